// A link to a section that is a tab ("Run it on Slurm") shows this tab.
"use strict";
function showTab() {
    const section = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const block = section && section.closest(".tabbed-block");
    if (!block) return;
    const place = [...block.parentElement.children].indexOf(block);
    block.closest(".tabbed-set").querySelectorAll(":scope > input")[place].click();
    section.scrollIntoView();
}

document.addEventListener("DOMContentLoaded", showTab);
window.addEventListener("hashchange", showTab);
