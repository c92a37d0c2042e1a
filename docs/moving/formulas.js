// What the moving pictures show, as functions of numbers alone; no page is needed. A test holds them to the planner's
// textbook formulas (tools/planner/textbook.py), to the exercises' solutions and to PyTorch.
"use strict";
const MIB = 2 ** 20;
const FORMULAS = {
    // Bytes that a rank sends in a collective; size: bytes of the tensor that it is given.
    bytesSent(kind, size, ranks) {
        const others = ranks - 1;
        if (kind === "all_reduce") return (2 * others * size) / ranks;
        if (kind === "reduce_scatter") return (others * size) / ranks;
        return kind === "all_gather" ? others * size : size;
    },

    // What each collective leaves on each rank. before[r]: the numbers of rank r.
    collective(kind, before) {
        const ranks = before.length, n = before[0].length / ranks;
        const sums = before[0].map((_, i) => before.reduce((sum, numbers) => sum + numbers[i], 0));
        const piece = (numbers, r) => numbers.slice(r * n, (r + 1) * n);
        return before.map((_, r) => ({
            broadcast: () => [...before[0]],
            all_reduce: () => sums,
            all_gather: () => before.flat(),
            reduce_scatter: () => piece(sums, r),
            all_to_all: () => before.flatMap((numbers) => piece(numbers, r)),
        })[kind]());
    },

    // Places of those numbers of rank `from` that the result of rank `to` needs.
    needed(kind, from, to, ranks, count) {
        const all = [...Array(count).keys()], n = count / ranks;
        if (kind === "broadcast") return from === 0 ? all : [];
        if (kind === "all_reduce" || kind === "all_gather") return all;
        return all.filter((i) => Math.floor(i / n) === to);
    },

    // The fair CRPS of members and its terms: errors, differences of pairs, their shares of the score.
    crps(members, truth) {
        const count = members.length, errors = members.map((value) => Math.abs(value - truth));
        const pairs = members.flatMap((value, i) => members.slice(i + 1).map((other) => Math.abs(value - other)));
        const sum = (numbers) => numbers.reduce((total, value) => total + value, 0);
        const error = sum(errors) / count, spread = sum(pairs) / (count * (count - 1));
        return { errors, pairs, error, spread, crps: error - spread };
    },

    // Ring all-reduce after so many of its 2 (n - 1) steps: chunks of each rank, and what each one sent last.
    ring(before, steps) {
        const n = before.length, mod = (i) => ((i % n) + n) % n;
        let chunks = before.map((each) => [...each]), sent = null;
        for (let step = 0; step < steps; step++) {
            const adds = step < n - 1, round = adds ? step : step - (n - 1);
            sent = chunks.map((_, rank) => mod((adds ? rank : rank + 1) - round));
            chunks = chunks.map((mine, rank) => {
                const from = mod(rank - 1), chunk = sent[from], now = [...mine];
                now[chunk] = chunks[from][chunk] + (adds ? mine[chunk] : 0);
                return now;
            });
        }
        return { chunks, sent };
    },

    // DDP: how many buckets the gradients of so many float32 parameters fill.
    buckets(parameters, capMib) {
        return Math.ceil((4 * parameters) / (capMib * MIB));
    },

    // DDP's buckets beside the backward pass. Times in ms: of the pass, of a message without bytes; speed in GB/s.
    // Each bucket: ready, begin, end.
    overlap({ parameters, capMib, ranks, backward, latency, speed }) {
        const count = FORMULAS.buckets(parameters, capMib), size = (4 * parameters) / count;
        const takes = latency + FORMULAS.bytesSent("all_reduce", size, ranks) / (speed * 1e6);
        const buckets = [];
        let free = 0;
        for (let i = 0; i < count; i++) {
            const ready = (backward * (i + 1)) / count, begin = Math.max(ready, free);
            free = begin + takes;
            buckets.push({ ready, begin, end: free });
        }
        return { buckets, size, exposed: Math.max(0, free - backward) };
    },

    // FSDP: parameters of units that are gathered while each of 2 L units computes, in units.
    gathered(units, strategy) {
        return [...Array(2 * units).keys()].map((i) => {
            const forward = i < units;
            if (strategy === "zero2") return forward ? Math.min(units, i + 2) : 2 * units - i;
            return Math.min(2, forward ? units - i : 2 * units - i); // this one, and the next one of the same pass
        });
    },

    // Share of a pipeline's time in which a rank waits.
    bubble(stages, parts) {
        return (stages - 1) / (parts + stages - 1);
    },

    // A pipeline's slots: for each stage [{slot, part, backward}]. Forward and backward of a part take a slot each.
    pipeline(stages, parts, schedule) {
        const orders = [...Array(stages).keys()].map((stage) => {
            const warm = schedule === "gpipe" ? parts : Math.min(parts, stages - stage), order = [];
            for (let i = 0; i < warm; i++) order.push({ part: i, backward: false });
            for (let i = 0; i < parts; i++) {
                order.push({ part: i, backward: true });
                if (warm + i < parts) order.push({ part: warm + i, backward: false });
            }
            return order;
        });
        const done = new Map(), key = (stage, each) => `${stage} ${each.part} ${each.backward}`;
        const next = orders.map(() => 0), rows = orders.map(() => []);
        for (let slot = 0; rows.some((row) => row.length < 2 * parts); slot++) {
            for (let stage = 0; stage < stages; stage++) {
                const each = orders[stage][next[stage]];
                if (!each) continue;
                const last = stage === stages - 1;
                const before = each.backward ? (last ? key(stage, { ...each, backward: false }) : key(stage + 1, each))
                    : stage === 0 ? null : key(stage - 1, each);
                if (before !== null && !(done.get(before) < slot)) continue;
                done.set(key(stage, each), slot);
                rows[stage].push({ ...each, slot });
                next[stage]++;
            }
        }
        return rows;
    },

    product(a, b) {
        return a.map((row) => b[0].map((_, j) => row.reduce((sum, value, k) => sum + value * b[k][j], 0)));
    },
    transposed: (a) => a[0].map((_, j) => a.map((row) => row[j])),
    sum: (a, b) => a.map((row, i) => row.map((value, j) => value + b[i][j])),

    // Two layers over two ranks: x A split by columns, then times B split by rows. Forward, and backward from `grad`.
    tensorParallel(x, a, b, grad) {
        const f = FORMULAS, half = a[0].length / 2;
        const ranks = [0, 1].map((r) => {
            const own = a.map((row) => row.slice(r * half, (r + 1) * half)), rows = b.slice(r * half, (r + 1) * half);
            const hidden = f.product(x, own), part = f.product(hidden, rows);
            const hiddenGrad = f.product(grad, f.transposed(rows));
            return {
                a: own, b: rows, hidden, part, hiddenGrad,
                bGrad: f.product(f.transposed(hidden), grad), aGrad: f.product(f.transposed(x), hiddenGrad),
                partGrad: f.product(hiddenGrad, f.transposed(own)),
            };
        });
        return { ranks, y: f.sum(ranks[0].part, ranks[1].part), xGrad: f.sum(ranks[0].partGrad, ranks[1].partGrad) };
    },

    // Running softmax: the state after another block of scores and values; {top, sum, out}, null before the first.
    attend(state, scores, values) {
        const top = Math.max(...scores, state ? state.top : -Infinity);
        const weights = scores.map((score) => Math.exp(score - top));
        const kept = state ? state.sum * Math.exp(state.top - top) : 0;
        const sum = kept + weights.reduce((a, b) => a + b, 0);
        const added = weights.reduce((total, weight, i) => total + weight * values[i], 0);
        return { top, sum, out: ((state ? state.out * kept : 0) + added) / sum };
    },

    // Time from start to end in which none of the work, [[start, end], ...], runs (exercise 10).
    exposed(start, end, work) {
        let alone = 0, reached = start;
        for (const [begin, stop] of [...work].sort((a, b) => a[0] - b[0])) {
            alone += Math.max(0, Math.min(begin, end) - reached);
            reached = Math.max(reached, stop);
        }
        return alone + Math.max(0, end - reached);
    },

    // A convolution of three points, weights all 1, over bands of rows; 0 beyond the image. Forward: each rank's rows
    // with its halo, and its outputs. Backward: of its extended rows, and of its own ones after the exchange.
    halo(bands, grads) {
        const rows = bands.flat(), at = (i) => rows[i] ?? 0;
        let first = 0;
        const ranks = bands.map((band, r) => {
            const extended = [at(first - 1), ...band, at(first + band.length)];
            const outputs = band.map((_, i) => extended[i] + extended[i + 1] + extended[i + 2]);
            const given = grads[r];
            const extendedGrad = extended.map((_, i) => (given[i] ?? 0) + (given[i - 1] ?? 0) + (given[i - 2] ?? 0));
            first += band.length;
            return { extended, outputs, extendedGrad };
        });
        ranks.forEach((rank, r) => {
            rank.grad = rank.extendedGrad.slice(1, -1);
            if (r > 0) rank.grad[0] += ranks[r - 1].extendedGrad.at(-1);
            if (r < ranks.length - 1) rank.grad[rank.grad.length - 1] += ranks[r + 1].extendedGrad[0];
        });
        return ranks;
    },
};
if (typeof module !== "undefined") module.exports = FORMULAS; // for a test without a page
