// Picture of rung 4: the halo of a convolution, forward and backward, with numbers.
"use strict";
const BANDS = [[2, 0, 1, 3], [1, 4, 0, 2], [3, 1, 2]];
const GRADS = [[1, 1, 0, 2], [0, 1, 2, 1], [1, 0, 1]]; // of the outputs, as the layer behind gives them
const HALO_SAID = [
    "Eleven rows over three ranks. Each output is the sum of a row and of its two neighbours (a convolution of 3, weights 1).",
    "Forward: each rank sends its edge rows. Orange: rows that came from a neighbour. Beyond the image is 0.",
    "Each rank computes on its extended rows, and keeps as many outputs as it has rows.",
    "Backward: the gradients of the outputs come from the layer behind.",
    "Each rank computes the gradient of its extended rows. Orange: it has a gradient for rows that it only borrowed.",
    "These go back to their owners and are added there (red). Now each row has the gradient of one device.",
];

PICTURES.halo = {
    title: "A halo, forward and backward",
    steps: () => HALO_SAID.length,
    draw(canvas, step) {
        const ranks = FORMULAS.halo(BANDS, GRADS), left = canvas.narrow ? 52 : 70;
        const cell = Math.min(56, (canvas.width - left - 4) / 6);
        ranks.forEach((rank, r) => {
            const y = 8 + r * 78, last = BANDS[r].length + 1;
            const row = (top, label, values, first, fill) => {
                canvas.text(left - 8, top + 12, label, "end", 11);
                values.forEach((value, i) => canvas.box(left + (first + i) * cell, top, cell - 3, 25, value, fill(first + i), 13));
            };
            const isEdge = (i) => i === 0 || i === last;
            const isBorrowed = (i) => isEdge(i) && !(r === 0 && i === 0) && !(r === ranks.length - 1 && i === last);
            const own = (i) => (isBorrowed(i) ? "talk" : isEdge(i) ? "wait" : RANK_FILLS[r]);
            canvas.text(2, y + 2, `rank ${r}`, "start", 12, true);
            if (step < 1) row(y + 14, "rows", BANDS[r], 1, own);
            else if (step < 3) row(y + 14, "rows", rank.extended, 0, own);
            if (step === 2 || step === 3) row(y + 42, "out", rank.outputs, 1, () => "wait");
            if (step === 3) row(y + 14, "d out", GRADS[r], 1, () => "b");
            if (step === 4) row(y + 14, "d out", GRADS[r], 1, () => "b");
            if (step === 4) row(y + 42, "d rows", rank.extendedGrad, 0, own);
            const isAdded = (i) => (i === 1 && r > 0) || (i === last - 1 && r < ranks.length - 1);
            if (step === 5) row(y + 14, "own", rank.extendedGrad.slice(1, -1), 1, own);
            if (step === 5) row(y + 42, "d rows", rank.grad, 1, (i) => (isAdded(i) ? "late" : RANK_FILLS[r]));
        });
        canvas.height = 8 + 3 * 78;
        return HALO_SAID[step];
    },
};
