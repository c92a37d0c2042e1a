// Pictures of rung 3: a product over two ranks with numbers, ring attention with the running softmax, pipelines.
"use strict";
const PAIR = {
    x: [[1, 0, 2, 1], [0, 1, 1, -1]],
    a: [[1, 0, 2, 1], [0, 1, 1, 0], [1, 1, 0, -1], [2, 0, 1, 1]],
    b: [[1, 0, 1, 2], [0, 1, 1, 0], [1, 1, 0, 1], [0, 2, 1, 0]],
    grad: [[1, 0, 0, -1], [0, 1, 0, 1]],
};
const PAIR_SAID = [
    "Two layers: x (2 tokens of 4 features) times A, then times B. One device has all of A and B. (GELU is left out.)",
    "Rank 0 has the first two columns of A, rank 1 the last two. Both have all of x. Each computes half of the hidden features.",
    "Rank 0 has the first two rows of B, rank 1 the last two: those that fit its hidden features. Each result is one term of a sum.",
    "One all-reduce adds the terms. Every rank has x A B, as one device has. That is the only message of the forward pass.",
    "Backward: the gradient of the result is the same on both ranks. Each takes it back through its rows of B. Nothing is sent.",
    "Back through its columns of A, each rank has one term of the gradient of x.",
    "One all-reduce adds these terms: the gradient of x, as on one device. Gradients of A and B stay where their weights are.",
];

PICTURES.column_row = {
    title: "Two layers split over two ranks, with numbers",
    steps: () => PAIR_SAID.length,
    draw(canvas, step) {
        const { x, a, b, grad } = PAIR, { ranks, y, xGrad } = FORMULAS.tensorParallel(x, a, b, grad);
        const cell = canvas.narrow ? 24 : 30, sign = canvas.narrow ? 18 : 30;
        const equation = (top, title, parts) => {
            canvas.text(2, top + 8, title, "start", 12, true);
            let at = 2;
            const tall = Math.max(...parts.map(([rows]) => (rows.length ? rows.length * 22 : 0)));
            for (const [rows, fill] of parts) {
                if (typeof rows === "string") {
                    canvas.text(at + sign / 2, top + 20 + tall / 2, rows, "middle", 14);
                    at += sign;
                } else at = canvas.matrix(at, top + 20 + (tall - rows.length * 22) / 2, rows, fill, cell);
            }
        };
        const both = (left, right, result, fill) => ranks.forEach((_, r) => equation(r * 128, `rank ${r}`, [
            [left(r), fill], ["×", ""], [right(r), RANK_FILLS[r]], ["=", ""], [result(r), "wait"]]));
        const added = (terms, total, title) => equation(0, title, [[terms[0], "a"], ["+", ""], [terms[1], "b"], ["=", ""], [total, "talk"]]);
        const t = FORMULAS.transposed;
        if (step === 0) {
            equation(0, "x A: the hidden features", [[x, "wait"], ["×", ""], [a, "none"], ["=", ""], [FORMULAS.product(x, a), "wait"]]);
            equation(128, "(x A) B", [[FORMULAS.product(x, a), "wait"], ["×", ""], [b, "none"], ["=", ""], [y, "wait"]]);
        }
        if (step === 1) both(() => x, (r) => ranks[r].a, (r) => ranks[r].hidden, "wait");
        if (step === 2) both((r) => ranks[r].hidden, (r) => ranks[r].b, (r) => ranks[r].part, "wait");
        if (step === 3) added(ranks.map((rank) => rank.part), y, "both ranks");
        if (step === 4) both(() => grad, (r) => t(ranks[r].b), (r) => ranks[r].hiddenGrad, "wait");
        if (step === 5) both((r) => ranks[r].hiddenGrad, (r) => t(ranks[r].a), (r) => ranks[r].partGrad, "wait");
        if (step === 6) added(ranks.map((rank) => rank.partGrad), xGrad, "both ranks");
        canvas.height = 240;
        return PAIR_SAID[step];
    },
};

const SCORES = [[1.0, 2.0], [0.5, 3.0], [-1.0, 2.5], [4.0, 0.0]]; // of one query with the two keys of each rank
const VALUES = [[1, 2], [4, 3], [5, 1], [2, 6]];

PICTURES.ring_attention = {
    title: "Ring attention: one query, keys and values in turn, and the running softmax",
    controls: [{ name: "rank", label: "the query's rank", value: 0, min: 0, max: 3 }],
    steps: () => 5,
    draw(canvas, step, { rank }) {
        const wide = canvas.width / 4, order = [0, 1, 2, 3].map((i) => (rank + 4 - i) % 4);
        for (let r = 0; r < 4; r++) {
            const turn = order.indexOf(r), fill = turn === step - 1 ? "talk" : turn < step ? "c" : "wait";
            canvas.text(r * wide + wide / 2, 10, `of rank ${r}`, "middle", 12, true);
            canvas.box(r * wide + 2, 22, wide - 4, 46, "", fill);
            canvas.text(r * wide + wide / 2, 34, canvas.narrow ? SCORES[r].join(", ") : `scores ${SCORES[r].join(", ")}`, "middle", 12);
            canvas.text(r * wide + wide / 2, 54, canvas.narrow ? VALUES[r].join(", ") : `values ${VALUES[r].join(", ")}`, "middle", 12);
        }
        if (canvas.narrow) canvas.text(2, 80, "above: scores; below: values", "start", 11);
        let state = null;
        const lines = order.slice(0, step).map((r) => {
            state = FORMULAS.attend(state, SCORES[r], VALUES[r]);
            return [`rank ${r}`, state.top, state.sum, state.out];
        });
        const cells = [["after", "largest", "sum", "output"], ...lines];
        cells.forEach((row, i) => row.forEach((value, j) => {
            const text = typeof value === "number" ? numberOf(value, 3) : value;
            canvas.text(j * wide + 6, 100 + i * 20, text, "start", 12, i === 0);
        }));
        canvas.height = 100 + 5 * 20;
        if (!step) return "A query stays on its rank. Keys and values go round: it sees two scores and two values at a time, and must not wait for all.";
        const r = order[step - 1], [, top, sum, out] = lines.at(-1);
        const whole = step === 4 ? " This is softmax over all eight scores, though no rank has held them together." : "";
        return `The block of rank ${r} ${step === 1 ? "lies here" : "has arrived"}. Largest score so far ${numberOf(top)}: `
            + `sum of exp(score - largest) ${numberOf(sum, 3)}, output ${numberOf(out, 3)}. A larger score shrinks the earlier sum.${whole}`;
    },
};

PICTURES.pipeline = {
    title: "A pipeline's schedule, slot by slot",
    controls: [
        { name: "stages", label: "stages p", value: 4, min: 2, max: 6 },
        { name: "parts", label: "micro-batches m", value: 4, min: 1, max: 12 },
        { name: "schedule", label: "schedule", value: "1f1b", options: ["1f1b", "gpipe"] },
    ],
    steps: ({ stages, parts }) => 2 * (parts + stages - 1) + 1,
    draw(canvas, step, { stages, parts, schedule }) {
        const rows = FORMULAS.pipeline(stages, parts, schedule), slots = 2 * (parts + stages - 1);
        const left = canvas.narrow ? 20 : 60, wide = (canvas.width - left - 2) / slots;
        let most = 0;
        rows.forEach((row, stage) => {
            const y = 4 + stage * 30;
            canvas.text(left - 6, y + 13, canvas.narrow ? stage : `stage ${stage}`, "end", 12);
            canvas.box(left, y, slots * wide, 26, "", "none");
            let kept = 0;
            for (const { part, backward, slot } of row.filter((each) => each.slot < step)) {
                const fits = wide - 3 >= 8 * String(part + 1).length;
                canvas.box(left + slot * wide, y, wide - 1, 26, fits ? part + 1 : "", slot === step - 1 ? "talk" : backward ? "b" : "a", 12);
                kept += backward ? -1 : 1;
                if (stage === 0) most = Math.max(most, kept);
            }
        });
        canvas.height = 8 + stages * 30;
        const share = numberOf(100 * FORMULAS.bubble(stages, parts));
        if (!step) return `${stages} stages, ${parts} micro-batches. Blue: forward; yellow: backward. How much of the time does each stage wait?`;
        if (step < slots) {
            const busy = rows.filter((row) => row.some(({ slot }) => slot === step - 1)).length;
            return `Slot ${step} of ${slots}: ${busy} of ${stages} stages work. Stage 0 has kept activations of at most ${most}.`;
        }
        return `Each stage works in ${2 * parts} of ${slots} slots. The bubble is (p-1)/(m+p-1) = ${stages - 1}/${parts + stages - 1}, ${share} %. `
            + `Stage 0 kept activations of at most ${most} micro-batches.`;
    },
};
