// Pictures of "ranks and collectives" and of rung 2: collectives, the ring, DDP's buckets, FSDP's units.
"use strict";
const RANK_FILLS = ["a", "b", "c", "d"];
const numberOf = (value, digits = 1) => value.toLocaleString("en", { maximumFractionDigits: digits });

const FOUR = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]];
const KINDS_SAID = {
    broadcast: "Rank 0 sends its numbers to all.",
    all_reduce: "Every rank has the sums, place by place.",
    all_gather: "Every rank has the numbers of all ranks, in order.",
    reduce_scatter: "Rank r has sum r, and nothing else.",
    all_to_all: "Number i of each rank has gone to rank i.",
};

function collectiveInputs(kind) { // an all-gather begins with one number on each rank
    return kind === "all_gather" ? FOUR.map((numbers) => [numbers[0]]) : FOUR;
}

PICTURES.collectives = {
    title: "What each collective leaves on four ranks",
    controls: [{ name: "kind", label: "collective", value: "all_reduce", options: Object.keys(KINDS_SAID) }],
    steps: () => 3,
    draw(canvas, step, { kind }) {
        const before = collectiveInputs(kind), after = FORMULAS.collective(kind, before);
        const cell = Math.min(44, (canvas.width - 70) / 4 - 2), owner = (value) => before.findIndex((row) => row.includes(value));
        canvas.text(64, 14, step === 2 ? "after" : "before", "start", 13, true);
        before.forEach((numbers, rank) => {
            const y = 30 + rank * 30, needed = FORMULAS.needed(kind, rank, 2, 4, numbers.length);
            canvas.text(54, y + 12, `rank ${rank}`, "end", 12);
            const shown = step === 2 ? after[rank] : kind === "broadcast" && rank ? [] : numbers;
            shown.forEach((value, i) => {
                const goes = step === 1 && (rank === 2 || needed.includes(i)) && (rank !== 2 || needed.includes(i));
                const fill = goes ? "talk" : owner(value) < 0 || (step === 2 && kind === "all_reduce") ? "wait" : RANK_FILLS[owner(value)];
                canvas.box(64 + i * (cell + 2) * (shown.length > 4 ? 0.5 : 1), y, cell, 24, value, fill, 13);
            });
        });
        canvas.height = 160;
        if (step === 0) return "Each rank has numbers of its own. Guess what every rank has afterwards, then go on.";
        if (step === 1) return "Orange: the numbers that the result of rank 2 is made of.";
        return KINDS_SAID[kind];
    },
    ask({ kind }) {
        const to = 1, mine = collectiveInputs(kind)[2], wanted = FORMULAS.needed(kind, 2, to, 4, mine.length);
        const reply = element("span", { role: "status" });
        const boxes = mine.map((value) => {
            const made = element("button", { type: "button", "aria-pressed": "false", class: "number" }, String(value));
            made.onclick = () => made.setAttribute("aria-pressed", made.getAttribute("aria-pressed") === "false");
            return made;
        });
        const check = element("button", { type: "button" }, "check");
        check.onclick = () => {
            const right = boxes.every((box, i) => (box.getAttribute("aria-pressed") === "true") === wanted.includes(i));
            const needs = wanted.length ? wanted.map((i) => mine[i]).join(", ") : "none of them";
            reply.textContent = right ? " Right." : ` Not yet: rank ${to} needs ${needs}.`;
        };
        return [`You are rank 2. Click those of your numbers that the result of rank ${to} needs: `, ...boxes, check, reply];
    },
};

PICTURES.ring = {
    title: "All-reduce in a ring, chunk by chunk",
    controls: [{ name: "ranks", label: "ranks", value: 4, min: 2, max: 6 }],
    steps: ({ ranks }) => 2 * (ranks - 1) + 1,
    draw(canvas, step, { ranks }) {
        const before = [...Array(ranks).keys()].map((r) => [...Array(ranks).keys()].map((c) => r * ranks + c + 1));
        const sums = FORMULAS.collective("all_reduce", before)[0], { chunks, sent } = FORMULAS.ring(before, step);
        const cell = Math.min(64, (canvas.width - 66) / ranks);
        for (let c = 0; c < ranks; c++) canvas.text(62 + (c + 0.5) * cell, 12, c, "middle", 12, true);
        canvas.text(54, 12, "chunk", "end", 12, true);
        chunks.forEach((mine, rank) => {
            const y = 24 + rank * 34;
            canvas.text(54, y + 13, `rank ${rank}`, "end", 12);
            mine.forEach((value, c) => {
                const arrived = sent && sent[(rank + ranks - 1) % ranks] === c;
                canvas.box(62 + c * cell, y, cell - 4, 26, value, arrived ? "talk" : value === sums[c] ? "c" : "wait", 13);
            });
        });
        const share = `${numberOf((step * 100) / ranks, 0)} % of its tensor`;
        if (step === 0) return "Each rank has its own numbers in each chunk. Which chunk does rank 0 send first?";
        const said = `Each rank has sent chunk by chunk ${share} so far. Orange has just arrived from the rank above (rank 0: from the last).`;
        if (step < ranks - 1) return `Reduce-scatter: what arrives is added. ${said}`;
        if (step === ranks - 1) return `The reduce-scatter is over: each rank has one whole sum. ${said}`;
        if (step < 2 * (ranks - 1)) return `All-gather: whole sums (green) replace what is there. ${said}`;
        return `Every rank has all sums. It has sent 2 (n-1)/n of its tensor, here ${share}.`;
    },
};

const DDP = { parameters: 85e6, ranks: 8, backward: 100, latency: 0.3, speed: 8 };

PICTURES.ddp_buckets = {
    title: "Buckets of gradients beside the backward pass",
    controls: [{ name: "capMib", label: "bucket, MiB", value: 25, options: [1, 5, 10, 25, 50, 100, 400] }],
    steps: ({ capMib }) => FORMULAS.buckets(DDP.parameters, Number(capMib)) + 1,
    draw(canvas, step, values) {
        const capMib = Number(values.capMib), { buckets, size, exposed } = FORMULAS.overlap({ ...DDP, capMib });
        const count = buckets.length;
        const left = canvas.narrow ? 4 : 84, top = canvas.narrow ? 20 : 6, whole = Math.max(DDP.backward, buckets.at(-1).end);
        const x = (time) => left + (time / whole) * (canvas.width - left - 8);
        const now = step ? buckets[step - 1].end : 0, y = top + (canvas.narrow ? 62 : 42);
        const label = (at, text) => canvas.narrow ? canvas.text(left, at - 11, text, "start", 12) : canvas.text(left - 8, at + 13, text, "end", 12);
        label(top, "backward");
        label(y, "all-reduce");
        canvas.box(x(0), top, x(DDP.backward) - x(0), 26, "", "wait");
        canvas.box(x(0), top, Math.max(1, x(Math.min(now, DDP.backward)) - x(0)), 26, "", "a");
        buckets.slice(0, step).forEach(({ begin, end }) => {
            const hidden = Math.min(end, DDP.backward);
            if (hidden > begin) canvas.add("rect", { x: x(begin), y, width: x(hidden) - x(begin), height: 26, class: "talk edge" });
            const from = Math.max(begin, DDP.backward);
            if (end > from) canvas.add("rect", { x: x(from), y, width: x(end) - x(from), height: 26, class: "late edge" });
        });
        canvas.height = y + 34;
        const times = `${count} bucket${count > 1 ? "s" : ""} of ${numberOf(size / MIB)} MiB`;
        if (!step) return `85 million parameters, 8 ranks, ${times}. A message takes 0.3 ms and its bytes at 8 GB/s. When does the first leave?`;
        const waits = `The backward pass takes 100 ms, and the step waits ${numberOf(exposed)} ms longer (red).`;
        if (step < count) return `Bucket ${step} of ${count} was ready at ${numberOf(buckets[step - 1].ready)} ms, and is reduced at ${numberOf(now)} ms.`;
        return `${times}. ${waits}`;
    },
};

PICTURES.fsdp_units = {
    title: "FSDP's units through a step, and the memory of a rank",
    controls: [
        { name: "strategy", label: "strategy", value: "fsdp", options: ["fsdp", "zero2"] },
        { name: "units", label: "units", value: 4, min: 2, max: 8 },
        { name: "ranks", label: "ranks", value: 4, min: 2, max: 8 },
    ],
    steps: ({ units }) => 2 * units + 1,
    draw(canvas, step, { strategy, units, ranks }) {
        const gathered = FORMULAS.gathered(units, strategy), slots = 2 * units, left = 4;
        const wide = (canvas.width - left - 4) / slots, unit = 48; // MiB of a unit: 12 D^2 numbers of 4 bytes, D = 1024
        const own = (4 * units * unit) / ranks; // a share of parameters, gradients and two moments
        const scale = 90 / (own + unit * Math.max(...gathered));
        canvas.text(left, 10, "compute: forward, then backward", "start", 12);
        canvas.text(left, 66, "memory of parameters, gradients, moments", "start", 12);
        for (let i = 0; i < slots; i++) {
            const name = i < units ? i + 1 : slots - i, x = left + i * wide, isNow = i === step - 1;
            canvas.box(x, 22, wide - 1, 26, name, isNow ? "talk" : i < step ? (i < units ? "a" : "b") : "wait", 13);
            if (i >= step) continue;
            const high = unit * gathered[i] * scale;
            canvas.add("rect", { x, y: 172 - own * scale, width: wide - 1, height: own * scale, class: "d" });
            canvas.add("rect", { x, y: 172 - own * scale - high, width: wide - 1, height: high, class: "c" });
        }
        canvas.add("path", { d: `M${left} 172 H${canvas.width - 4}`, class: "arrow" });
        canvas.height = 180;
        if (!step) return `${units} units of ${unit} MiB on ${ranks} ranks. Between steps a rank holds 1/${ranks} of everything: ${numberOf(own)} MiB.`;
        const i = step - 1, name = i < units ? i + 1 : slots - i, count = gathered[i];
        const held = `Held: ${numberOf(own)} MiB of its own (pink) and ${count} gathered unit${count > 1 ? "s" : ""} (green), ${numberOf(own + count * unit)} MiB.`;
        const after = i >= units ? " Its gradients then go to their owners by a reduce-scatter."
            : strategy === "fsdp" ? " Then it is dropped." : " It stays gathered until its backward pass.";
        return `${i < units ? "Forward" : "Backward"} of unit ${name}.${after} ${held}`;
    },
};
