// Pictures that one can step through: each takes the place of a drawing of the page, which stays for print and for
// browsers without scripts. A picture is PICTURES[name]: {title, controls, steps(values), draw(canvas, step, values)};
// draw returns the sentence that is read out. No library, no network.
"use strict";
const PICTURES = {};
const SVG = "http://www.w3.org/2000/svg";
const PLAY_MS = 1500;

function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
}

// Draws in pixels of the page, so that type has its size on every screen.
class Canvas {
    constructor(width) {
        this.width = width;
        this.height = 0;
        this.svg = document.createElementNS(SVG, "svg");
        this.narrow = width < 520;
    }

    add(tag, attributes, text = "") {
        const made = document.createElementNS(SVG, tag);
        for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
        made.textContent = text;
        this.svg.append(made);
        return made;
    }

    box(x, y, width, height, text = "", fill = "none", size = 13) {
        const box = this.add("rect", { x, y, width, height, rx: 3, class: `${fill} edge` });
        if (text !== "") this.text(x + width / 2, y + height / 2, text, "middle", size);
        this.height = Math.max(this.height, y + height + 6);
        return box;
    }

    text(x, y, text, anchor = "start", size = 13, bold = false) {
        const weight = bold ? 600 : 400;
        const at = { x, y: y + size * 0.35, "text-anchor": anchor, "font-size": size, "font-weight": weight };
        this.height = Math.max(this.height, y + size);
        return this.add("text", at, text);
    }

    arrow(x0, y0, x1, y1) {
        const turn = Math.atan2(y1 - y0, x1 - x0), tip = 7;
        const wing = (way) => `${x1 - tip * Math.cos(turn + way)} ${y1 - tip * Math.sin(turn + way)}`;
        this.add("path", { d: `M${x0} ${y0} L${x1} ${y1} M${wing(0.45)} L${x1} ${y1} L${wing(-0.45)}`, class: "arrow" });
    }

    // Rows of numbers with a bracket of boxes; returns the right edge.
    matrix(x, y, rows, fill, cell = 27) {
        rows.forEach((row, i) => row.forEach((value, j) => this.box(x + j * cell, y + i * 22, cell - 1, 21, value, fill, 12)));
        return x + rows[0].length * cell;
    }

    finish() {
        const size = { viewBox: `0 0 ${this.width} ${this.height}`, width: this.width, height: this.height };
        for (const [name, value] of Object.entries(size)) this.svg.setAttribute(name, value);
        return this.svg;
    }
}

class Stepper {
    constructor(figure) {
        this.picture = PICTURES[figure.dataset.picture];
        this.step = 0;
        this.values = {};
        this.stage = element("div", { class: "stage" });
        this.said = element("p", { class: "said", "aria-live": "polite" });
        this.place = element("span", { class: "place" });
        this.bar = element("div", { class: "bar" });
        this.frame = element("div", { class: "stepper", role: "group", tabindex: 0, "aria-label": this.picture.title });
        this.frame.append(this.stage, this.said, this.bar);
        figure.prepend(this.frame);
        figure.classList.add("moves");
        this.back = this.button("back", () => this.go(this.step - 1));
        this.next = this.button("next", () => this.go(this.step + 1));
        this.play = this.button("play", () => this.playing(!this.timer));
        this.bar.append(this.place);
        for (const control of this.picture.controls || []) this.control(control);
        this.frame.addEventListener("keydown", (event) => this.key(event));
        new ResizeObserver(() => this.show()).observe(figure);
        this.show();
    }

    button(text, action) {
        const made = element("button", { type: "button" }, text);
        made.onclick = action;
        this.bar.append(made);
        return made;
    }

    // {name, label, value, options: [...]} is a choice, {name, label, value, min, max} a slider.
    control({ name, label, value, options, min, max }) {
        this.values[name] = value;
        const shown = element("output", {}, String(value));
        const input = options ? element("select", { name }) : element("input", { type: "range", name, min, max, value });
        for (const option of options || []) input.append(element("option", { value: option }, String(option)));
        input.value = value;
        input.oninput = () => {
            this.values[name] = typeof value === "number" ? Number(input.value) : input.value;
            shown.textContent = input.value;
            this.step = Math.min(this.step, this.last());
            this.show();
        };
        const whole = element("label", {}, `${label} `, input);
        if (!options) whole.append(" ", shown);
        this.bar.append(whole);
    }

    last() {
        return this.picture.steps(this.values) - 1;
    }

    go(step) {
        this.step = Math.max(0, Math.min(this.last(), step));
        if (this.step === this.last()) this.playing(false);
        this.show();
    }

    playing(on) {
        clearInterval(this.timer);
        if (on && this.step === this.last()) this.step = 0;
        this.timer = on ? setInterval(() => this.go(this.step + 1), PLAY_MS) : null;
        this.play.textContent = on ? "stop" : "play";
    }

    key(event) {
        const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (event.target.matches("input, select") || way === undefined) return;
        event.preventDefault();
        this.go(this.step + way);
    }

    show() {
        const width = Math.floor(Math.min(this.stage.clientWidth, 700));
        if (!width) return; // in a tab that is not shown
        const canvas = new Canvas(width);
        this.said.textContent = this.picture.draw(canvas, this.step, this.values);
        const svg = canvas.finish();
        svg.setAttribute("role", "img");
        svg.setAttribute("aria-label", this.picture.title);
        this.stage.replaceChildren(svg);
        this.place.textContent = `step ${this.step} of ${this.last()}`;
        this.back.disabled = this.step === 0;
        this.next.disabled = this.step === this.last();
        if (this.picture.ask) this.ask();
    }

    // A question in the picture: its boxes are buttons (picture.ask), and the answer is told when it is asked for.
    ask() {
        if (!this.asked) {
            this.asked = element("div", { class: "asked" });
            this.frame.append(this.asked);
        }
        this.asked.replaceChildren(...this.picture.ask(this.values));
    }
}

function begin() {
    for (const figure of document.querySelectorAll("figure[data-picture]")) figure.stepper = new Stepper(figure);
}
if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
else begin();
