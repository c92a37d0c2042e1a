// Ten questions before or after a rung (docs/quiz_page.py): counts the first answers and saves them as the file that
// `python -m tools.course quiz` reads.
"use strict";
function followQuiz(quiz) {
    const asked = [...quiz.querySelectorAll("details.predict")], answers = {}, bar = document.createElement("p");
    const said = document.createElement("span"), button = document.createElement("button");
    let right = 0;
    said.setAttribute("role", "status");
    button.textContent = "save the answers";
    button.disabled = true;
    bar.className = "predict";
    bar.append(button, " ", said);
    quiz.append(bar);
    quiz.addEventListener("answered", ({ target, detail }) => {
        const { name } = target.dataset;
        if (name in answers) return; // the first answer counts
        answers[name] = detail.given;
        right += detail.right ? 1 : 0;
        button.disabled = false;
        said.textContent = `${Object.keys(answers).length} of ${asked.length} answered, ${right} right at the first try`;
    });
    button.onclick = () => {
        const { rung, when, questions } = quiz.dataset, link = document.createElement("a");
        const record = { rung: Number(rung), when, questions, time: new Date().toISOString(), answers };
        link.href = URL.createObjectURL(new Blob([`${JSON.stringify(record, null, 1)}\n`], { type: "application/json" }));
        link.download = `quiz_${rung}_${when}.json`;
        link.click();
    };
}

document.addEventListener("DOMContentLoaded", () => document.querySelectorAll("details.quiz").forEach(followQuiz));
