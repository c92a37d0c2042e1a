// The page to play with: computes layouts by the planner's formulas (planner.js) and shows them. No library.
"use strict";
const COLOURS = ["#b6d4fe", "#fde49b", "#b9e8c4", "#f6c6dd", "#ffc9a0", "#d7c9f7", "#bfe9ee", "#e3dccb"];
const KINDS = ["#74a9f5", "#f2c744", "#76c98a", "#e58bb5", "#ff9f5a", "#a78bda", "#9aa4ae"];
const MOST = 1024, MOST_APART = 32; // GPUs, and those that split a model or an image between them
const SPLIT = ["n", "tp", "cp", "pp", "domain", "ens"], WAYS = ["strategy", "parts", "again"], CHOICES = [...SPLIT, ...WAYS];
const STATE = ["gpu", "model", "image", "batch", ...CHOICES]; // what the address of the page keeps
const LISTED = 16; // partners of a rank that are named one by one
const page = document.getElementById("explorer");
const form = page.querySelector("form");
const at = (id) => document.getElementById(id);
let rows = [], rank = 0, by = "tp", begun = false, kept = null; // kept: the facts of a layout to compare with

const make = (tag, text, attributes = {}) => {
    const element = document.createElement(tag);
    element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
};
const number = (value, digits = 1) => value.toLocaleString("en", { maximumFractionDigits: digits });
const about = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 }); // of times, whose margin is wide
const asked = () => Object.fromEntries(["gpu", "model", "image", "batch"].map((name) => [name, form[name].value]));
const chosen = () => Object.fromEntries(CHOICES.map((name) => [name, form[name].value]));
const same = (row, choice, names = CHOICES) => names.every((name) => String(row[name]) === String(choice[name]));
const current = () => rows.find((row) => same(row, chosen()));
const gpu = () => CONSTANTS.gpus[form.gpu.value];
const mib = () => gpu().memory / 2 ** 20;
const fits = (row) => row.needed <= 0.95 * mib();
const divisors = (n) => [...Array(n).keys()].map((i) => i + 1).filter((size) => n % size === 0);
const widthOf = (value) => String(value).split("x").reduce((a, b) => a * b, 1);

// A layout whose numbers are computed when they are asked for.
class Row {
    constructor(choice) {
        Object.assign(this, choice);
    }

    get plan() {
        const made = PLANNER.plan(this.key, this);
        Object.defineProperty(this, "plan", { value: made });
        return made;
    }

    get dp() { return this.plan.dp; }
    get memory() { return this.plan.memory; }
    get needed() { return this.plan.needed; }
    get ms() { return this.plan.ms; }
    get messages() { return this.plan.messages; }
}

// What can be chosen of each dimension for so many GPUs, whether or not it goes with the rest.
function valuesOf(n) {
    const sizes = divisors(n).filter((size) => size <= MOST_APART), members = CONSTANTS.models[form.model.value].members;
    const tiles = sizes.flatMap((size) => divisors(size).reverse().map((bands) => `${bands}x${size / bands}`));
    const parts = [...new Set([1, 4, ...sizes.flatMap((size) => [size, 2 * size, 4 * size])])].sort((a, b) => a - b);
    return {
        tp: sizes, cp: sizes, pp: sizes, domain: tiles, ens: sizes.filter((size) => size <= members),
        strategy: ["ddp", "zero1", "zero2", "fsdp", "hsdp"], parts, again: ["none", "full"],
    };
}

// All layouts of so many GPUs that the scripts run.
function rowsOf(n) {
    const values = valuesOf(n), found = [], own = asked(), apart = (...sizes) => sizes.reduce((a, b) => a * widthOf(b), 1);
    const isTooWide = (...sizes) => apart(...sizes) > MOST_APART || n % apart(...sizes);
    for (const tp of values.tp) for (const cp of values.cp) for (const pp of values.pp) {
        if (isTooWide(tp, cp, pp)) continue;
        for (const domain of values.domain) for (const ens of values.ens) {
            if (isTooWide(tp, cp, pp, domain, ens)) continue;
            for (const parts of pp > 1 ? [pp, 2 * pp, 4 * pp] : [1, 4]) {
                const split = { n, tp, cp, pp, domain, ens, parts };
                if (PLANNER.refusal(own, split)) continue;
                for (const strategy of n / (tp * pp) > 1 ? values.strategy : ["ddp"])
                    for (const again of values.again) found.push(new Row({ ...split, strategy, again, key: own }));
            }
        }
    }
    return found;
}

function fill(name, values, keep) {
    form[name].replaceChildren(...values.map((value) => make("option", value, { value })));
    form[name].value = values.map(String).includes(String(keep)) ? keep : values[0];
}

// A model, an image and a batch by the first word of their choice: small, 360, 32.
const shortOf = (name, value) => (["model", "image", "batch"].includes(name) ? String(value).split(/[ :]/)[0] : String(value));

function remember() { // the choices in the address, to come back to and to send to others
    history.replaceState(null, "", `#${STATE.map((name) => `${name}=${encodeURIComponent(shortOf(name, form[name].value))}`).join("&")}`);
}

function recall() { // the choices that the address has, or the layout of the list that it names
    const place = location.hash.slice(1), named = document.querySelector(`[data-preset][href="#${CSS.escape(place)}"]`);
    const given = new URLSearchParams(named ? named.dataset.preset : place);
    if (!STATE.some((name) => given.has(name))) return null;
    for (const name of ["gpu", "model", "image", "batch"]) {
        const option = [...form[name].options].find((each) => shortOf(name, each.value) === given.get(name));
        if (option) form[name].value = option.value;
    }
    return Object.fromEntries([...given].filter(([name]) => CHOICES.includes(name)));
}

function load(wanted) { // the layouts of a machine, a model, an image and a number of GPUs
    const before = { ...(rows.length ? chosen() : { n: "8" }), ...wanted };
    form.n.value = Math.min(MOST, Math.max(1, Math.floor(Number(before.n)) || 1));
    rows = rowsOf(Number(form.n.value));
    const values = valuesOf(Number(form.n.value));
    for (const name of CHOICES.slice(1)) {
        const goes = (value) => name !== "parts" || rows.some((row) => row.parts === value);
        fill(name, values[name].filter(goes), before[name]);
    }
    const isEmpty = !rows.length;
    for (const each of page.querySelectorAll("form ~ *")) each.classList.toggle("none", isEmpty && each.id !== "verdict");
    if (isEmpty) {
        const alone = { n: Number(form.n.value), tp: 1, cp: 1, pp: 1, domain: "1x1", ens: 1, parts: 1 };
        at("verdict").textContent = `No layout: ${PLANNER.refusal(asked(), alone)}.`;
        return;
    }
    settle();
    show();
}

function settle() { // another way where the chosen one does not go with the layout
    const choice = chosen(), split = rows.filter((row) => same(row, choice, SPLIT));
    if (!current()) set(split.find((row) => same(row, choice, ["strategy", "again"])) || split[0] || rows[0]);
}

function set(row) {
    for (const name of CHOICES) form[name].value = row[name];
}

function coordinates(row, r) { // of a rank: neighbours differ in tp first, then cp, domain, ens, dp, pp
    const sizes = sizesOf(row), place = {};
    for (const [name, size] of Object.entries(sizes)) { place[name] = r % size; r = Math.floor(r / size); }
    return place;
}

function sizesOf(row) {
    const domain = row.domain.split("x").reduce((a, b) => a * b, 1);
    return { tp: row.tp, cp: row.cp, domain, ens: row.ens, dp: row.dp, pp: row.pp };
}

function partners(row, r, name) { // ranks that differ from r along one dimension only
    const mine = coordinates(row, r);
    return [...Array(row.n).keys()].filter((other) => {
        const theirs = coordinates(row, other);
        return Object.keys(mine).every((each) => each === name || mine[each] === theirs[each]);
    });
}

function showRanks(row) {
    const sizes = sizesOf(row), names = Object.keys(sizes).filter((name) => sizes[name] > 1);
    if (!names.includes(by)) by = names[0] || "dp";
    rank = Math.min(rank, row.n - 1);
    at("by").replaceChildren(...(names.length ? names : ["dp"]).flatMap((name) => {
        const button = make("button", name, { type: "button", role: "radio", "aria-checked": String(name === by) });
        button.onclick = () => { by = name; showRanks(row); at("by").querySelector("[aria-checked=true]").focus(); };
        return [button, " "];
    }));
    const group = [...Array(row.n).keys()].map((r) => Object.values({ ...coordinates(row, r), [by]: 0 }).join());
    const groups = Object.fromEntries([...new Set(group)].map((each, i) => [each, i])), count = Object.keys(groups).length;
    const mine = new Set(partners(row, rank, by)), per = gpu().gpus_per_node;
    at("ranks").replaceChildren(...[...Array(Math.ceil(row.n / per)).keys()].map((node) => {
        const line = make("div", "", { role: "row" });
        line.append(make("span", `node ${node}`, { role: "rowheader" }));
        for (let r = node * per; r < Math.min(row.n, (node + 1) * per); r++) {
            const cell = make("span", r, { role: "gridcell", tabindex: r === rank ? 0 : -1, "data-rank": r });
            cell.style.background = COLOURS[groups[group[r]] % COLOURS.length];
            cell.classList.toggle("mine", mine.has(r));
            cell.onpointerenter = cell.onclick = () => look(row, r, false);
            line.append(cell);
        }
        return line;
    }));
    at("partners").textContent = `Rank ${rank}: ` + (names.map((name) =>
        `${name} ${coordinates(row, rank)[name]} of ${sizes[name]}, with ${listed(partners(row, rank, name))}`).join("; ")
        || "it works alone") + ".";
    at("repeated").textContent = count <= COLOURS.length ? "" :
        `There are ${count} groups of ${by} and ${COLOURS.length} colours: rank ${rank} works only with ${listed([...mine])}, which have a frame.`;
}

function listed(ranks) {
    if (ranks.length <= LISTED) return ranks.join(" ");
    return `${ranks.slice(0, LISTED - 2).join(" ")} ... ${ranks.at(-1)} (${ranks.length} ranks)`;
}

function look(row, r, focus) {
    if (r === rank && !focus) return;
    rank = r;
    showRanks(row);
    if (focus) at("ranks").querySelector(`[data-rank="${r}"]`).focus();
}

function showMemory(row) {
    const total = row.memory.reduce((a, b) => a + b, 0), limit = mib(), scale = Math.max(row.needed, limit);
    const shares = [...row.memory, Math.max(0, row.needed - total)], names = [...CONSTANTS.kinds, "outside, lost"];
    at("bar").replaceChildren(...shares.map((size, i) => {
        const part = make("span", "");
        part.style.cssText = `background:${KINDS[i]};width:${(100 * size) / scale}%`;
        return part;
    }));
    const mark = make("i", "");
    mark.style.left = `${Math.min(99.5, (100 * limit) / scale)}%`;
    at("bar").append(mark);
    const table = [["", "GiB"], ...names.map((name, i) => [name, shares[i]]), ["needed at once", row.needed], [`${form.gpu.value} has`, limit]];
    at("held").replaceChildren(...table.map(([name, size], i) => {
        const line = make("tr", ""), title = make(i ? "td" : "th", name);
        if (i && i <= names.length) {
            const swatch = make("span", "", { class: "swatch" });
            swatch.style.background = KINDS[i - 1];
            title.prepend(swatch);
        }
        line.append(title, make(i ? "td" : "th", i ? number(size / 1024, 2) : size, { class: "number" }));
        return line;
    }));
}

function showMessages(row) {
    const head = ["message", "group", "where", "count", "MiB"];
    const lines = row.messages.map((message) => {
        const [phase, kind, group, inside, count, sent] = message;
        return [`${phase} ${kind}`, group, inside ? "inside a node" : "across nodes", number(count), number(sent, 2)];
    });
    at("sent").replaceChildren(...[head, ...(lines.length ? lines : [["nothing", "", "", "", ""]])].map((cells, i) => {
        const line = make("tr", "");
        line.append(...cells.map((text, j) => make(i ? "td" : "th", text, j > 2 && i ? { class: "number" } : {})));
        return line;
    }));
}

function facts(row) { // [name, text] of what two layouts are compared by
    const sent = (inside) => row.messages.reduce((sum, [, , , within, , size]) => sum + (within === inside ? size : 0), 0);
    const split = Object.entries(sizesOf(row)).filter(([, size]) => size > 1).map(([name, size]) => `${name} ${size}`);
    return [
        ["GPUs", `${row.n} of ${form.gpu.value}`], ["model", form.model.value], ["image", form.image.value],
        ["global batch", form.batch.value], ["layout", split.join(" x ") || "one GPU"], ["strategy", row.strategy],
        ["micro-batches", number(row.parts)], ["checkpointing", row.again],
        ...CONSTANTS.kinds.map((kind, i) => [`${kind}, GiB`, number(row.memory[i] / 1024, 2)]),
        ["needed at once, GiB", number(row.needed / 1024, 2)],
        ["sent inside a node, MiB", number(sent(true))], ["sent across nodes, MiB", number(sent(false))],
        ["step, ms", about(row.ms)], ["samples/s", speedOf(row)],
    ];
}

function showBeside(row) {
    at("beside").hidden = !kept;
    if (!kept) return;
    const lines = facts(row).map(([name, text], i) => [name, kept[i][1], text]);
    at("beside").replaceChildren(...[["", "kept", "this one"], ...lines].map((cells, i) => {
        const line = make("tr", "", { class: cells[1] === cells[2] ? "" : "differs" });
        line.append(...cells.map((text) => make(i ? "td" : "th", text)));
        return line;
    }));
}

function commandOf(row) {
    const domain = row.domain.split("x").reduce((a, b) => a * b, 1), per = gpu().gpus_per_node, nodes = Math.ceil(row.n / per);
    const script = domain > 1 ? "shard" : row.tp * row.cp * row.pp > 1 ? "mp" : "";
    const { models, images, batches, base } = CONSTANTS;
    const words = [base, models[form.model.value].options, images[form.image.value].options, batches[form.batch.value].options];
    if (row.tp > 1) words.push(`--tensor_parallel=${row.tp}`);
    if (row.cp > 1) words.push(`--context_parallel=${row.cp}`);
    if (row.pp > 1) words.push(`--pipeline_parallel=${row.pp}`);
    if (row.parts > 1) words.push(`--gradient_accumulation=${row.parts}`);
    if (row.again !== "none") words.push(`--activation_checkpointing=${row.again}`);
    if (domain > 1) words.push(`--domain_parallel=${row.domain}`);
    if (row.ens > 1) words.push(`--ensemble_parallel=${row.ens}`);
    if (row.strategy !== "ddp") words.push(`--data_parallel=${row.strategy}`);
    const program = script ? `train_${script}.py` : "train.py";
    const start = row.n === 1 ? `python ${program}` : nodes === 1 ? `torchrun --nproc_per_node=${row.n} ${program}`
        : `sbatch -N ${nodes}${per === 4 ? "" : ` --gpus-per-node=${per}`} submit_${script || "dp"}.sh`;
    return [start, ...words].filter(Boolean).join(" ");
}

// What goes with none of the other choices is grey, and the reason is told.
function greyOut() {
    const reasons = new Map();
    for (const name of CHOICES.slice(1)) {
        const others = CHOICES.filter((each) => each !== name && (SPLIT.includes(each) || WAYS.includes(name)));
        for (const option of form[name].options) {
            option.disabled = !rows.some((row) => String(row[name]) === option.value && same(row, chosen(), others));
            const reason = option.disabled ? reasonOf(name, option.value) : "";
            option.title = reason;
            if (reason) reasons.set(reason, [...(reasons.get(reason) || []), `${name} ${option.value}`]);
        }
    }
    const lines = [...reasons].map(([reason, which]) => make("li", `${which.join(", ")}: ${reason}`));
    at("why").replaceChildren(...lines);
}

function reasonOf(name, value) {
    const row = current(), choice = { ...row, [name]: typeof row[name] === "number" ? Number(value) : value };
    if (name === "pp") choice.parts = choice.pp;
    const refused = PLANNER.refusal(asked(), choice);
    if (refused) return refused;
    if (name === "strategy") return "one rank has these weights, so there is nothing to share";
    const apart = SPLIT.slice(1).reduce((product, each) => product * widthOf(choice[each]), 1);
    return apart > MOST_APART ? `more than ${MOST_APART} GPUs would split a model or an image` : "goes with none of the other choices";
}

function show() {
    greyOut();
    const row = current();
    const share = `${number(row.needed / 1024)} of ${number(mib() / 1024)} GiB`;
    const room = fits(row) ? (row.needed <= 0.85 * mib() ? "It fits." : "It just fits.")
        : rows.some(fits) ? `It does not fit: ${share}.`
        : row === least() ? `Nothing fits; this layout needs least: ${share}.` : `Nothing fits; this layout needs ${share}.`;
    at("verdict").textContent = `${room} A step takes about ${about(row.ms)} ms, give or take ${100 * CONSTANTS.error} % (a trace says up to a tenth more): ${speedOf(row)} samples/s. dp ${row.dp}, the ranks that are left.`;
    showBeside(row);
    showRanks(row);
    showMemory(row);
    showMessages(row);
    // A line breaks between words alone.
    const words = commandOf(row).split(" ").map((word) => make("span", word, { class: "whole" }));
    at("line").replaceChildren(...words.flatMap((word, i) => (i ? [" ", word] : [word])));
    if (begun) remember();
}

function speedOf(row) {
    return about((CONSTANTS.batches[form.batch.value].samples / row.ms) * 1e3);
}

function least() {
    return rows.reduce((a, b) => (b.needed < a.needed ? b : a));
}

function begin() {
    fill("gpu", Object.keys(CONSTANTS.gpus));
    fill("model", Object.keys(CONSTANTS.models), Object.keys(CONSTANTS.models)[1]);
    fill("image", Object.keys(CONSTANTS.images));
    fill("batch", Object.keys(CONSTANTS.batches));
    for (const name of ["gpu", "model", "image", "batch", "n"]) form[name].onchange = () => load({ n: form.n.value });
    for (const name of CHOICES.slice(1)) form[name].onchange = () => {
        settle();
        show();
    };
    form.best.onclick = () => {
        set(rows.filter(fits).sort((a, b) => a.ms - b.ms)[0] || least());
        show();
    };
    form.keep.onclick = () => {
        kept = facts(current());
        show();
    };
    at("ranks").onkeydown = (event) => {
        const row = current(), step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: gpu().gpus_per_node, ArrowUp: -gpu().gpus_per_node }[event.key];
        if (step === undefined) return;
        event.preventDefault();
        look(row, Math.min(row.n - 1, Math.max(0, rank + step)), true);
    };
    load(recall());
    begun = true;
    window.addEventListener("hashchange", () => {
        const wanted = recall();
        if (!wanted) return;
        load(wanted);
        page.scrollIntoView();
    });
}
begin();
