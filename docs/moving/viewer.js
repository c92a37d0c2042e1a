// The stored traces (TRACES, made by docs/traces.py) on a time line that zooms, and a question to it.
"use strict";
const VIEWED = { forward: "a", backward: "b", optimizer: "c", data: "d", reduce: "d" };
const LANE = 20, STEPS = 24; // height of a row; steps of the keyboard through the width

class Viewer {
    constructor(frame) {
        this.end = Math.max(...TRACES.flatMap(({ ranges, messages }) => [...ranges.map((each) => each[2]), ...messages.map((each) => each[1])]));
        this.from = 0;
        this.to = this.end;
        this.stage = element("div", { class: "stage" });
        this.said = element("p", { class: "said", "aria-live": "polite" });
        this.bar = element("div", { class: "bar" });
        frame.classList.add("stepper", "viewer");
        frame.setAttribute("tabindex", 0);
        frame.append(this.stage, this.said, this.bar);
        const actions = { "+": 0.5, "-": 2, "<": "back", ">": "on", all: "all" };
        const titles = { "+": "zoom in", "-": "zoom out", "<": "earlier", ">": "later", all: "all of it" };
        for (const [text, how] of Object.entries(actions)) {
            const button = element("button", { type: "button", "aria-label": titles[text] }, text);
            button.onclick = () => this.move(how);
            this.bar.append(button);
        }
        frame.addEventListener("keydown", (event) => {
            const how = { "+": 0.5, "-": 2, ArrowLeft: "back", ArrowRight: "on" }[event.key];
            if (!how) return;
            event.preventDefault();
            this.move(how);
        });
        this.stage.addEventListener("wheel", (event) => {
            if (!event.ctrlKey) return; // else the page scrolls
            event.preventDefault();
            this.zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX / this.stage.clientWidth);
        }, { passive: false });
        this.stage.addEventListener("pointermove", (event) => {
            if (event.buttons) this.pan((-event.movementX / this.stage.clientWidth) * (this.to - this.from));
        });
        this.said.textContent = "Which message of rank 1 is exposed longest: runs while rank 1 computes nothing? Click it.";
        new ResizeObserver(() => this.show()).observe(frame);
    }

    move(how) {
        const width = this.to - this.from;
        if (how === "all") [this.from, this.to] = [0, this.end];
        else if (how === "back" || how === "on") this.pan((how === "on" ? 4 : -4) * (width / STEPS));
        else this.zoom(how, 0.5);
        this.show();
    }

    zoom(by, place) {
        const at = this.from + place * (this.to - this.from), width = Math.min(this.end, Math.max(200, (this.to - this.from) * by));
        this.from = Math.max(0, Math.min(this.end - width, at - place * width));
        this.to = this.from + width;
        this.show();
    }

    pan(by) {
        const moved = Math.max(-this.from, Math.min(this.end - this.to, by));
        this.from += moved;
        this.to += moved;
        this.show();
    }

    show() {
        const canvas = new Canvas(Math.floor(this.stage.clientWidth)), wide = canvas.width;
        if (!wide) return;
        const x = (time) => ((time - this.from) / (this.to - this.from)) * wide;
        const span = (start, stop, y, fill, text = "") => {
            const left = Math.max(0, x(start)), right = Math.min(wide, x(stop));
            if (right <= 0 || left >= wide) return null;
            const box = canvas.add("rect", { x: left, y, width: Math.max(0.7, right - left), height: LANE - 3, class: fill });
            if (right - left > 8 * text.length + 6) canvas.text((left + right) / 2, y + 9, text, "middle", 12);
            return box;
        };
        TRACES.forEach(({ rank, ranges, work, messages }, r) => {
            const y = 18 + r * (5 * LANE + 8);
            canvas.text(2, y - 8, `rank ${rank}: ranges, work, messages`, "start", 12, true);
            for (const [name, start, stop] of ranges) span(start, stop, y, VIEWED[name], name);
            for (const [start, stop] of work) span(start, stop, y + LANE, "worked");
            const lanes = [-Infinity, -Infinity];
            messages.forEach(([start, stop], i) => {
                const lane = lanes[0] <= start ? 0 : 1; // two threads of gloo
                lanes[lane] = stop;
                const box = span(start, stop, y + (2 + lane) * LANE, "talk edge", String(i + 1));
                if (!box) return;
                const label = `message ${i + 1} of rank ${rank}`;
                for (const [name, value] of Object.entries({ tabindex: 0, role: "button", "aria-label": label })) box.setAttribute(name, value);
                box.addEventListener("click", () => this.tell(r, i));
                box.addEventListener("keydown", (event) => event.key === "Enter" && this.tell(r, i));
            });
        });
        canvas.height = 18 + TRACES.length * (5 * LANE + 8) + 10;
        const ms = (time) => `${numberOf(time / 1000, 1)} ms`;
        canvas.text(2, canvas.height - 12, ms(this.from), "start", 12);
        canvas.text(wide - 2, canvas.height - 12, ms(this.to), "end", 12);
        this.stage.replaceChildren(canvas.finish());
    }

    tell(r, i) {
        const { rank, work, messages } = TRACES[r];
        const alone = messages.map(([start, stop]) => FORMULAS.exposed(start, stop, work));
        const [start, stop] = messages[i], ms = (time) => numberOf(time / 1000, 1);
        const isMost = alone[i] === Math.max(...alone);
        const reply = rank !== 1 ? "The question is about rank 1." : isMost
            ? "Yes, the longest. It waits for rank 0, whose forward pass begins late: look above it." : "Not the longest: look for work beside it.";
        this.said.textContent = `Message ${i + 1} of rank ${rank} takes ${ms(stop - start)} ms, of which ${ms(alone[i])} are exposed. ${reply}`;
    }
}

document.addEventListener("DOMContentLoaded", () => {
    const frame = document.getElementById("viewer");
    if (frame && typeof TRACES !== "undefined") new Viewer(frame);
});
