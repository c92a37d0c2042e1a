// "Predict first": a question takes an answer before it shows its own. In a page it is
// <details class="predict" data-answer="28.25" data-tolerance="0.02" data-unit="MiB"><summary>question</summary>answer</details>
// (tolerance: a share of the answer), or with data-choices="a|b|c" in place of the last two.
"use strict";
function isRight(given, { answer, tolerance, choices }) {
    if (choices) return given === answer;
    const wanted = Number(answer), found = Number(String(given).replace(/,/g, ""));
    return Math.abs(found - wanted) <= Number(tolerance || 0) * Math.abs(wanted) + 1e-9;
}

function askFirst(details) {
    const asked = details.dataset, summary = details.querySelector("summary");
    const input = asked.choices ? document.createElement("select") : document.createElement("input");
    for (const choice of asked.choices ? ["", ...asked.choices.split("|")] : []) input.add(new Option(choice, choice));
    if (!asked.choices) Object.assign(input, { type: "text", inputMode: "decimal", size: 8 });
    input.required = true;
    const form = document.createElement("form"), label = document.createElement("label"), reply = document.createElement("p");
    label.append(...[...summary.childNodes].map((node) => node.cloneNode(true)), " ", input, ` ${asked.unit || ""} `);
    const button = document.createElement("button");
    button.textContent = "answer";
    reply.setAttribute("role", "status");
    form.className = "predict";
    form.append(label, button, reply);
    details.before(form);
    details.hidden = true;
    summary.textContent = "The answer";
    form.onsubmit = (event) => {
        event.preventDefault();
        const isNumber = asked.choices || !Number.isNaN(Number(input.value.replace(/,/g, "")));
        if (!isNumber || !input.value) {
            reply.textContent = "A number, please.";
            return;
        }
        const right = isRight(input.value, asked);
        details.dispatchEvent(new CustomEvent("answered", { bubbles: true, detail: { given: input.value, right } }));
        reply.textContent = right ? "Right." : `You said ${input.value}. It is ${asked.answer} ${asked.unit || ""}.`;
        details.hidden = false;
        details.open = true;
    };
}

document.addEventListener("DOMContentLoaded", () => document.querySelectorAll("details.predict").forEach(askFirst));
