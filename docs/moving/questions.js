// "Predict first": a question takes an answer before it shows its own. In a page it is
// <details class="predict" data-answer="28.25" data-tolerance="0.02" data-unit="MiB"><summary>question</summary>answer</details>
// (tolerance: a share of the answer), or with data-choices="a|b|c" in place of the last two.
"use strict";
// The finite numbers that a text may mean: none, one, or the two of "1,000". tools/course/quiz.py has the same.
function numbersOf(text) {
    const written = [], given = String(text).trim();
    if (/^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?$/i.test(given)) written.push(given);
    if (/^[+-]?([0-9]*|[1-9][0-9]{0,2}(\.[0-9]{3})+),[0-9]+$/.test(given))
        written.push(given.replace(/\./g, "").replace(",", "."));
    if (/^[+-]?[1-9][0-9]{0,2}(,[0-9]{3})+(\.[0-9]+)?$/.test(given)) written.push(given.replace(/,/g, ""));
    return written.map(Number).filter(Number.isFinite);
}

function isRight(given, { answer, tolerance, choices }) {
    if (choices) return given === answer;
    const wanted = Number(answer), bound = Number(tolerance || 0) * Math.abs(wanted) + 1e-9;
    return numbersOf(given).some((found) => Math.abs(found - wanted) <= bound);
}

// What to say to a learner whose answer is not one number; "" where it is.
function complaintOf(given) {
    const found = numbersOf(given), [small, large] = found;
    if (found.length < 2) return found.length ? "" : "A number, please.";
    // A keypad may have no point.
    return `${given} may be ${small} or ${large}. For ${large}, leave the comma out; for ${small}, add a zero at the end.`;
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
        const complaint = asked.choices ? "" : complaintOf(input.value);
        if (complaint) {
            reply.textContent = complaint;
            return;
        }
        const right = isRight(input.value, asked), wanted = `${asked.answer} ${asked.unit || ""}`.trim();
        details.dispatchEvent(new CustomEvent("answered", { bubbles: true, detail: { given: input.value, right } }));
        reply.textContent = right ? "Right." : `You said ${input.value}. It is ${wanted}.`;
        details.hidden = false;
        details.open = true;
    };
}

document.addEventListener("DOMContentLoaded", () => document.querySelectorAll("details.predict").forEach(askFirst));
