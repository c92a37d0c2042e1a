// Slides: arrow keys, space, Page Up and Down, Home and End; n shows the notes, p opens a second window that goes along.
"use strict";
const LARGEST = 28, SMALLEST = 14;
const slides = [...document.querySelectorAll(".slide")];
let now = 0, other = window.opener;

function fits(body) {
    return body.scrollHeight <= body.clientHeight && body.scrollWidth <= body.clientWidth;
}

// The largest type with which everything of a slide fits.
function fit(slide) {
    const body = slide.querySelector(".body");
    let low = SMALLEST, high = LARGEST;
    while (low < high) {
        const size = Math.ceil((low + high) / 2);
        slide.style.setProperty("--size", `${size}px`);
        if (fits(body)) low = size;
        else high = size - 1;
    }
    slide.style.setProperty("--size", `${low}px`);
}

function scale() {
    const height = document.body.classList.contains("noted") ? 960 : 720;
    document.body.style.setProperty("--scale", Math.min(innerWidth / 1280, innerHeight / height));
}

function go(place, tells = true) {
    now = Math.min(Math.max(place, 0), slides.length - 1);
    slides.forEach((slide, i) => slide.classList.toggle("now", i === now));
    history.replaceState(null, "", `#${now + 1}`);
    if (tells && other) other.postMessage(now, "*");
}

function showNotes() {
    document.body.classList.toggle("noted");
    scale();
}

function openSecond() {
    other = window.open(`${location.href.split("#")[0]}#${now + 1}`, "_blank");
}

const KEYS = {
    ArrowRight: () => go(now + 1), PageDown: () => go(now + 1), " ": () => go(now + 1), ArrowDown: () => go(now + 1),
    ArrowLeft: () => go(now - 1), PageUp: () => go(now - 1), ArrowUp: () => go(now - 1),
    Home: () => go(0), End: () => go(slides.length - 1), n: showNotes, p: openSecond,
};
document.addEventListener("keydown", (event) => {
    const isPlain = !event.ctrlKey && !event.metaKey && !event.altKey, onButton = event.key === " " && event.target.matches("button");
    if (!isPlain || onButton || !(event.key in KEYS)) return;
    event.preventDefault();
    KEYS[event.key]();
});
window.addEventListener("message", ({ data, source }) => {
    if (source === other && Number.isInteger(data)) go(data, false);
});
window.addEventListener("resize", scale);

const bar = document.createElement("nav");
for (const [words, key] of [["back", "ArrowLeft"], ["on", "ArrowRight"], ["notes", "n"], ["second window", "p"]]) {
    const button = document.createElement("button");
    button.textContent = words;
    button.onclick = KEYS[key];
    bar.append(button);
}
document.body.append(bar);
function begin() {
    slides.forEach(fit);
    document.body.classList.add("shown");
    scale();
    go(Number(location.hash.slice(1) || 1) - 1);
}
window.addEventListener("load", begin); // pictures have their sizes now
