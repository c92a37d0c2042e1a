// Picture of the lesson on ensembles: a CRPS term by term, for members that one can move.
"use strict";
const CRPS_SAID = [
    "Three forecasts of one number (blue), and what came true (orange, y). How good is this ensemble? Move the sliders at any step.",
    "First term: how far each member is from the truth. The mean of these errors pulls members to the truth.",
    "Second term: how far members are from one another, over all pairs. It is taken off, so it keeps members apart.",
];

PICTURES.crps = {
    title: "A CRPS, term by term",
    controls: [
        { name: "first", label: "member 0", value: 1, min: 0, max: 6 },
        { name: "second", label: "member 1", value: 2, min: 0, max: 6 },
        { name: "third", label: "member 2", value: 4, min: 0, max: 6 },
        { name: "truth", label: "truth", value: 3, min: 0, max: 6 },
    ],
    steps: () => 5,
    draw(canvas, step, { first, second, third, truth }) {
        const members = [first, second, third], score = FORMULAS.crps(members, truth);
        const left = canvas.narrow ? 14 : 40, unit = (canvas.width - 2 * left) / 6;
        const x = (value) => left + value * unit;
        const bar = (from, to, y, fill) => {
            const start = Math.min(x(from), x(to)), length = Math.abs(x(from) - x(to));
            canvas.add("rect", { x: start, y, width: Math.max(length, 2), height: 8, class: `${fill} edge` });
        };
        for (let value = 0; value <= 6; value++) canvas.text(x(value), 98, value, "middle", 12);
        canvas.add("rect", { x: x(0), y: 86, width: 6 * unit, height: 1, class: "wait edge" });
        members.forEach((value, i) => canvas.box(x(value) - 9, 4 + 20 * i, 18, 18, i, "a", 12));
        canvas.box(x(truth) - 9, 64, 18, 18, "y", "talk", 12);
        canvas.text(left, 122, `errors: ${score.errors.join(" + ")}`, "start", 12, true);
        if (step >= 1) members.forEach((value, i) => bar(value, truth, 134 + 12 * i, "a"));
        const pairs = [[0, 1], [0, 2], [1, 2]];
        if (step >= 2) {
            canvas.text(left, 186, `pairs: ${score.pairs.join(" + ")}`, "start", 12, true);
            pairs.forEach(([i, j], k) => bar(members[i], members[j], 198 + 12 * k, "c"));
        }
        if (step >= 3) {
            const said = `${numberOf(score.error, 3)} - ${numberOf(score.spread, 3)} = ${numberOf(score.crps, 3)}`;
            canvas.text(left, 250, `CRPS: ${said}`, "start", 14, true);
        }
        canvas.height = 266;
        if (step < 3) return CRPS_SAID[step];
        const sum = "The mean error, less the sum over pairs divided by M (M - 1) = 6, is the fair CRPS. The smaller, the better.";
        if (step === 3) return sum;
        const mean = (first + second + third) / 3;
        const alike = FORMULAS.crps([mean, mean, mean], truth).crps;
        return `Three members that all say their mean, ${numberOf(mean)}, would score ${numberOf(alike, 3)}; `
            + `these score ${numberOf(score.crps, 3)}. A squared error knows only the mean, and so makes members alike.`;
    },
};
