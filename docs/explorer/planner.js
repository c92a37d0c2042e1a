// The formulas of the planner (docs/reference/formulas.md), for what the page to play with can choose: a vision
// transformer in bf16, compiled, with fused Adam; keys and values are gathered, and pipelines run 1f1b.
// Each function is that of the same name in tools/planner; tests/test_explorer.py compares them with it.
// CONSTANTS (explorer/constants.js) are made by docs/explorer_data.py.
"use strict";
const PLANNER = (() => {
    const FULL = 4, WIDTH = 2, MIB = 2 ** 20, MLP = 4, CAP = 25 * MIB;
    const COMPILED = 0.5, FRAGMENTATION = 0.15, HEADS = [32, 64, 96, 128, 192, 256];
    const SHARDED = ["zero2", "fsdp", "hsdp"], PHASES = ["forward", "backward", "update"];
    const HIDING = ["dp", "cp", "domain", "ens", "image", "sample"];
    const gcd = (a, b) => (b ? gcd(b, a % b) : a);
    const sum = (values) => values.reduce((a, b) => a + b, 0);
    const tilesOf = (domain) => [...String(domain).split("x").map(Number), 1].slice(0, 2);

    // A layout with what it is made of. choice: n, tp, cp, pp, domain ("2x1"), ens, strategy, parts, again.
    function layoutOf(gpu, choice) {
        const [rows, columns] = tilesOf(choice.domain), { n, tp, cp, pp, ens, strategy } = choice;
        const others = tp * cp * pp * ens * rows * columns, dp = n / others;
        const inside = Math.max(1, Math.floor(gcd(gpu.gpus_per_node, n) / others));
        const shard = strategy === "hsdp" ? gcd(inside, dp) : null;
        // The first dimension has adjacent ranks as neighbours.
        const mesh = [["tp", tp], ["cp", cp], ["domain_lon", columns], ["domain_lat", rows], ["ens", ens],
            ["dp_shard", shard || dp], ["dp_replicate", dp / (shard || dp)], ["pp", pp]];
        return { n, tp, cp, pp, ens, dp, rows, columns, shard, mesh };
    }

    // Why no script runs a layout, in the words of the scripts; "" where one does.
    function refusal(key, choice) {
        const model = CONSTANTS.models[key.model], image = CONSTANTS.images[key.image], batch = CONSTANTS.batches[key.batch];
        const [rows, columns] = tilesOf(choice.domain), { n, tp, cp, pp, ens, parts } = choice;
        const tiles = columns > 1 ? `${rows}x${columns}` : rows;
        const split = [["tp", tp], ["cp", cp], ["ens", ens], ["pp", pp], ["domain", rows * columns > 1 ? tiles : 1]]
            .filter(([, size]) => size !== 1).map(([name, size]) => `${name} ${size}`).join(" x ");
        const others = tp * cp * pp * ens * rows * columns, dp = n / others;
        if (n % others) return `${n} ranks cannot be split as ${split} x dp: ${n} is not a multiple of ${others}`;
        if (batch.samples % (dp * parts)) {
            const who = dp === n ? `${dp} ranks` : `${dp} data-parallel ranks`, pieces = parts > 1 ? ` in ${parts} micro-batches` : "";
            return `global_batch_size ${batch.samples} cannot be shared by ${who}${pieces}: it is not a multiple of ${dp * parts}`;
        }
        if (rows * columns > 1 && cp > 1) return "domain_parallel goes without context_parallel, which splits the same tokens: give it all their ranks";
        if (rows * columns > 1 && pp > 1)
            return "domain_parallel goes without pipeline_parallel, whose stages exchange whole tokens: split the weights with tensor_parallel or data_parallel fsdp";
        if (model.members === 1 && ens > 1) return `ensemble_parallel ${ens} shares out the members of a sample: give ensemble_size too`;
        if (ens > model.members) return `ensemble_parallel ${ens}: more ranks than the ${model.members} members of ensemble_size`;
        if (model.members > 1 && pp > 1)
            return "ensemble_size goes without pipeline_parallel, whose stages exchange nothing but tokens: split with tensor_parallel, context_parallel or ensemble_parallel";
        if (model.heads % tp) return `tensor parallel: ${model.heads} heads cannot be split over ${tp} ranks`;
        if (cp > image.rows) return `context parallel: ${image.rows} rows of patches cannot be split over ${cp} ranks`;
        if (rows > image.rows || columns > image.columns) return `${image.rows} x ${image.columns} patches cannot be split into ${rows} x ${columns} tiles`;
        if (model.depth % pp) return `pipeline parallel: ${model.depth} blocks cannot be shared by ${pp} stages`;
        return "";
    }

    // symbols.py: how much of the model and of the batch a rank of a stage has.
    function symbols(key, layout, choice, stage) {
        const model = CONSTANTS.models[key.model], image = CONSTANTS.images[key.image], batch = CONSTANTS.batches[key.batch];
        const s = { layout, strategy: choice.strategy, t: layout.tp, c: layout.cp * layout.rows * layout.columns, m: choice.parts };
        s.isFirst = stage === 0;
        s.isLast = stage === layout.pp - 1;
        s.members = Math.ceil(model.members / layout.ens);
        s.ensemble = model.members;
        s.b = Math.floor(batch.samples / layout.dp / s.m) * s.members;
        s.n = Math.ceil(image.rows / (layout.cp * layout.rows)) * Math.ceil(image.columns / layout.columns);
        s.N = image.rows * image.columns;
        s.inputs = image.inputs;
        s.outputs = image.outputs;
        s.states = s.b * s.n * s.outputs;
        s.D = model.features;
        s.head = model.features / model.heads;
        s.L = model.depth / layout.pp;
        s.layer = s.b * s.n * s.D;
        s.stream = s.layer;
        s.hidden = (s.layer * MLP) / s.t;
        s.recomputed = choice.again === "full" ? s.L : 0;
        s.matrices = ((4 + 2 * MLP) * s.D ** 2) / s.t;
        s.block = s.matrices + ((3 + MLP) * s.D) / s.t + 6 * s.D;
        const embedding = s.isFirst ? (s.inputs + 1 + s.N) * s.D : 0, head = s.isLast ? 2 * s.D + (s.D + 1) * s.outputs : 0;
        s.rest = embedding + (model.noise ? (model.noise + 1) * s.D + (s.D + 1) * 2 * s.D : 0) + head;
        s.parameters = s.L * s.block + s.rest;
        s.replicas = layout.dp * layout.ens * s.c;
        s.isSharded = SHARDED.includes(s.strategy) && s.replicas > 1;
        s.shards = s.isSharded ? (layout.shard || layout.dp) * layout.ens * s.c : 1;
        s.usesDdp = s.replicas > 1 && !s.isSharded;
        s.updated = s.parameters / s.shards / (s.strategy === "zero1" ? s.replicas : 1);
        s.inFlight = Math.min(s.m, layout.pp - stage);
        return s;
    }

    // textbook.py: bytes that a rank holds.
    function memory(s) {
        const own = (FULL * s.parameters) / s.shards, optimizer = FULL * 2 * s.updated, imageBytes = FULL * s.b * s.n * s.inputs;
        const batch = (s.m * (imageBytes + FULL * s.states)) / s.members;
        const kept = keptActivations(s, imageBytes), buffers = bufferBytes(s), moment = largestMoment(s);
        let passes = kept + moment + buffers;
        if (s.usesDdp) passes += own;
        else if (!s.isSharded) passes = Math.max(passes, blockActivations(s) + own);
        const peak = batch + own + optimizer + Math.max(passes, own);
        return { parameters: own, gradients: own, optimizer, activations: kept, temporaries: moment, buffers, batch, peak };
    }

    function blockActivations(s) {
        const attention = s.c > 1 ? 4 + 2 * s.c : 4;
        return 2 * FULL * s.stream + WIDTH * (2 * s.layer + (attention * s.layer) / s.t + 2 * s.hidden) + WIDTH * s.matrices;
    }

    function lossBytes(s) {
        if (s.ensemble === 1) return FULL * s.states;
        const points = s.states / s.members / s.layout.ens, pairs = (s.ensemble * (s.ensemble - 1)) / 2;
        return FULL * points * (s.ensemble + (s.ensemble <= CONSTANTS.most_in_pairs ? pairs : 2 * s.ensemble));
    }

    function keptActivations(s, imageBytes) {
        const blocks = (s.L - s.recomputed) * blockActivations(s) + s.recomputed * FULL * s.stream;
        const head = s.isLast ? FULL * s.stream + WIDTH * s.layer + lossBytes(s) : 0;
        return (blocks + (s.isFirst ? imageBytes / 2 : 0) + head) * s.inFlight;
    }

    function bufferBytes(s) {
        const received = FULL * s.stream * s.m * (2 - s.isFirst - s.isLast);
        const blocks = s.strategy === "zero2" ? s.L : Math.min(s.L, 2);
        return received + (s.isSharded ? FULL * (blocks * s.block + s.rest) : 0);
    }

    function largestMoment(s) {
        let mlp = (FULL + WIDTH) * s.stream + WIDTH * s.hidden;
        if (s.recomputed) mlp += blockActivations(s) - FULL * s.stream;
        let moment = Math.max(2 * FULL * s.states, mlp);
        if (s.isSharded) moment = Math.max(moment, 2 * FULL * s.block - blockActivations(s));
        return moment + (!s.usesDdp && s.m > 1 ? FULL * s.parameters : 0);
    }

    // textbook_counts.py: [{phase, kind, group, ranks, count, bytes}] of a step, bytes of all calls.
    function messages(s) {
        const found = new Map(), { layout } = s;
        const add = (phase, kind, group, size, calls) => {
            const ranks = ranksOf(layout, group), [times, shared] = shareSent(kind, ranks.length);
            if (!calls || ranks.length < 2) return;
            const name = `${phase} ${kind} ${group}`, before = found.get(name) || { phase, kind, group, ranks, count: 0, bytes: 0 };
            before.count += Math.floor(calls);
            before.bytes += Math.floor(calls) * Math.floor((size * times) / shared);
            found.set(name, before);
        };
        add("forward", "all_reduce", "tp", WIDTH * s.layer, 2 * s.L * s.m);
        add("backward", "all_reduce", "tp", WIDTH * s.layer, (2 * s.L + s.recomputed) * s.m);
        const tokens = layout.cp > 1 ? "cp" : "domain", both = (2 * WIDTH * s.layer) / s.t, once = s.m * s.L, again = s.m * s.recomputed;
        add("forward", "all_gather", tokens, both, once);
        add("backward", "all_gather", tokens, both, again);
        add("backward", "reduce_scatter", tokens, both * s.c, once);
        const ofMember = (WIDTH * s.states) / s.members / layout.ens;
        add("forward", "all_to_all", "ens", ofMember * s.members * (layout.ens - 1), s.m);
        add("backward", "all_to_all", "ens", ofMember * (s.ensemble - s.members), s.m);
        add("forward", "send", "pp", FULL * s.stream, s.m * (1 - s.isLast));
        add("backward", "send", "pp", FULL * s.stream, s.m * (1 - s.isFirst));
        const group = s.c * layout.ens > 1 ? "grad_reduce" : "dp";
        if (s.usesDdp) {
            const buckets = Math.ceil((FULL * s.parameters) / CAP);
            add("backward", "all_reduce", group, (FULL * s.parameters) / buckets, buckets);
        }
        if (s.strategy === "zero1") add("update", "broadcast", group, FULL * s.updated, s.replicas);
        if (s.isSharded) addSharded(s, add, s.strategy === "hsdp" ? group.replace("dp", "dp_shard") : group);
        return [...found.values()];
    }

    function addSharded(s, add, group) {
        const isPipeline = s.layout.pp > 1, zero2 = s.strategy === "zero2";
        const forward = zero2 ? (isPipeline ? 1 : s.m) : isPipeline ? s.inFlight : s.m, units = s.L + 1, own = s.parameters / s.shards / units;
        add("forward", "all_gather", group, FULL * own, units * forward);
        add("backward", "all_gather", group, FULL * own, zero2 ? 0 : units * s.m);
        add("backward", "reduce_scatter", group, (FULL * s.parameters) / units, units);
        if (s.strategy === "hsdp") add("backward", "all_reduce", "dp_replicate", FULL * own, units);
    }

    function shareSent(kind, ranks) {
        return { all_reduce: [2 * (ranks - 1), ranks], all_gather: [ranks - 1, 1], reduce_scatter: [ranks - 1, ranks] }[kind] || [1, 1];
    }

    function ranksOf(layout, group) { // of the group that rank 0 is in
        const dp = ["dp_shard", "dp_replicate"], domain = ["domain_lat", "domain_lon"];
        const along = { dp, domain, grad_reduce: [...dp, ...domain, "cp", "ens"] }[group] || [group];
        let stride = 1, ranks = [0];
        for (const [name, size] of layout.mesh) {
            if (along.includes(name)) ranks = [...Array(size).keys()].flatMap((i) => ranks.map((rank) => rank + i * stride));
            stride *= size;
        }
        return ranks;
    }

    // textbook_counts.py: [{phase, kind, flops, moved, calls}]; calls of alike operations may be listed twice.
    function operations(s) {
        const found = [], calls = s.m * s.L, again = s.m * s.recomputed, tokens = s.b * s.n;
        const add = (phase, kind, flops, moved, times) => { if (times) found.push({ phase, kind, flops, moved, calls: times }); };
        const product = (inner, columns, times, repeated = 0) => {
            const flops = 2 * tokens * inner * columns, moved = WIDTH * (tokens * (inner + columns) + inner * columns);
            add("forward", "matmul", flops, moved, times);
            add("backward", "matmul", flops, moved, 2 * times + repeated);
        };
        const moves = (phase, moved, kernels, times) => add(phase, "memory", 0, moved / kernels, kernels * times);
        const inside = (s.D * MLP) / s.t;
        for (const [inner, columns] of [[s.D, (3 * s.D) / s.t], [s.D / s.t, s.D], [s.D, inside], [inside, s.D]]) product(inner, columns, calls, again);
        const flops = (4 * s.layer * s.N) / s.t, moved = (4 * WIDTH * s.layer) / s.t;
        add("forward", "attention", flops, moved, calls);
        add("backward", "attention", flops, moved, again);
        add("backward", "attention", 2.5 * flops, 2 * moved, calls);
        let others = 56 * s.stream + 2 * WIDTH * s.hidden + (FULL + WIDTH) * s.matrices;
        if (s.c > 1) others += (4 * WIDTH * s.c * s.layer) / s.t;
        moves("forward", others, 18, calls);
        moves("backward", others, 18, 2 * calls + again);
        if (s.isFirst) product(s.inputs, s.D, s.m);
        if (s.isLast) product(s.D, s.outputs, s.m);
        for (const phase of ["forward", "backward"]) moves(phase, 20 * s.states, 5, s.m);
        if (s.usesDdp) moves("backward", 2 * FULL * s.parameters, 12 * s.L, 1);
        moves("update", 4 * FULL * s.updated, 1, 1);
        return found;
    }

    // operation_time.py: seconds of an operation on a GPU.
    function operationSeconds(gpu, s, { phase, kind, flops, moved }) {
        const isFused = kind === "memory" && phase !== "update", share = isFused ? COMPILED : 1;
        const bytes = (moved * share) / (gpu.bandwidth * gpu.memory_efficiency);
        const seconds = flops ? Math.max(bytes, flops / rate(gpu, s.head, kind)) : bytes;
        return Math.max(seconds, gpu.kernel * share);
    }

    function rate(gpu, head, kind) {
        if (kind !== "attention") return gpu.bf16 * gpu.matmul_efficiency;
        const wanted = head <= 256 && head % 8 === 0 ? "cudnn" : "flash", { attention } = gpu;
        const shares = attention[wanted] || attention.flash || Object.values(attention)[0];
        const sizes = Object.keys(shares).map(Number).sort((a, b) => a - b), size = sizes.find((each) => each >= head) || sizes.at(-1);
        const padded = HEADS.find((each) => each >= head) || head;
        return (gpu.bf16 * shares[size] * head) / padded;
    }

    // operation_time.py: seconds of all calls of a collective, in the group that lies worst.
    function collectiveSeconds(gpu, { kind, bytes, count, ranks }, shapes) {
        const link = gpu.link * gpu.network_efficiency, nic = gpu.nic * gpu.network_efficiency, size = ranks.length, ring = kind !== "send";
        return Math.max(...shapes.map(([nodes, fewest]) => {
            let seconds = bytes / Math.min(link, nic * fewest), hops = (size - nodes) * gpu.hop_inside + (nodes - 1) * gpu.hop_across;
            if (nodes === 1) seconds = bytes / link;
            else if (!ring) seconds = bytes / nic;
            else if (kind === "all_to_all") seconds = (bytes * ((size - fewest) / (size - 1))) / nic;
            if (!ring) hops = nodes > 1 ? gpu.hop_across : gpu.hop_inside;
            if (kind === "all_reduce") hops = Math.min(hops, (size / nodes - 1) * gpu.hop_inside + Math.log2(nodes) * gpu.hop_across);
            return count * (kind === "all_reduce" ? 2 : 1) * hops + seconds;
        }));
    }

    function nodeShapes(ranks, n, perNode) { // [nodes, fewest ranks on a node] of every group that is laid out like this one
        const seen = new Uint8Array(n), shapes = new Map();
        for (let first = 0; first < n; first++) {
            if (seen[first]) continue;
            const counts = new Map();
            for (const offset of ranks) {
                seen[first + offset] = 1;
                const node = Math.floor((first + offset) / perNode);
                counts.set(node, (counts.get(node) || 0) + 1);
            }
            const place = first % perNode;
            if (!shapes.has(place)) shapes.set(place, [counts.size, Math.min(...counts.values())]);
        }
        return [...shapes.values()];
    }

    // step_time.py and rank_seconds.py: {seconds, sent} of a rank.
    function rankTime(gpu, s) {
        const { layout } = s, table = Object.fromEntries(PHASES.map((phase) => [phase, 0])), host = { ...table };
        const launch = gpu.launch * COMPILED;
        for (const operation of operations(s)) {
            table[operation.phase] += operation.calls * operationSeconds(gpu, s, operation);
            host[operation.phase] += operation.calls * launch;
        }
        const computing = { ...table };
        let ofMicroBatches = computing.forward + computing.backward;
        const sent = messages(s).map((message) => {
            const shapes = nodeShapes(message.ranks, layout.n, gpu.gpus_per_node);
            host[message.phase] += message.count * launch;
            const isInside = shapes.every(([nodes]) => nodes === 1);
            return { ...message, inside: isInside, seconds: collectiveSeconds(gpu, message, shapes) };
        });
        const sharded = SHARDED.includes(s.strategy), kindOf = (group) => group.split("_")[0];
        const isHidden = ({ phase, kind, group }) => (phase === "backward" && kind === "all_reduce" && HIDING.includes(kindOf(group)))
            || (sharded && phase !== "update" && kindOf(group) === "dp");
        const bucket = ({ ranks, bytes, count, seconds }) => {
            const ofFull = ((2 * (ranks.length - 1)) / ranks.length) * CAP;
            return seconds / (sharded ? count : Math.max(count, bytes / ofFull));
        };
        for (const phase of PHASES) {
            const here = sent.filter((each) => each.phase === phase), hidden = here.filter(isHidden);
            const waited = sum(here.filter((each) => !isHidden(each)).map(({ seconds }) => seconds));
            const total = sum(hidden.map(({ seconds }) => seconds)), behind = computing[phase] / (sharded ? 1 : s.m);
            const exposed = Math.min(total, Math.max(0, total - behind) + sum(hidden.map(bucket)));
            table[phase] += waited + exposed;
            ofMicroBatches += waited;
        }
        // A GPU that waits for its host takes as long as the host.
        const phases = PHASES.map((phase) => Math.max(table[phase], host[phase]));
        return { seconds: sum(phases) + ((layout.pp - 1) * ofMicroBatches) / s.m, sent };
    }

    // plan.py: what the page shows of a layout. key: {gpu, model, image, batch}.
    function plan(key, choice) {
        const gpu = CONSTANTS.gpus[key.gpu], layout = layoutOf(gpu, choice);
        const stages = [...new Set([0, layout.pp - 1])].map((stage) => symbols(key, layout, choice, stage));
        const held = stages.map(memory), most = (name) => Math.max(...held.map((each) => each[name])), batch = most("batch");
        const sizes = CONSTANTS.kinds.map((name) => most(name) + (name === "activations" ? 2 * batch : 0));
        const peak = most("peak") + batch + 2 * gpu.workspace_mib * MIB;
        const needed = peak + Math.floor(gpu.overhead_gib * 2 ** 30) + FRAGMENTATION * peak;
        const times = stages.map((s) => rankTime(gpu, s)), slowest = times.reduce((a, b) => (b.seconds > a.seconds ? b : a));
        const sent = slowest.sent.map(({ phase, kind, group, inside, count, bytes }) => [phase, kind, group, inside, count, bytes / MIB]);
        return { dp: layout.dp, memory: sizes.map((size) => size / MIB), needed: needed / MIB, ms: slowest.seconds * 1e3, messages: sent };
    }

    return { plan, refusal, tilesOf };
})();
if (typeof module !== "undefined") module.exports = PLANNER;
