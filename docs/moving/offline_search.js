// Search from a file: a browser starts no worker from file://, so the worker is made of its own text (SEARCH_WORKER).
"use strict";
if (location.protocol === "file:" && typeof SEARCH_WORKER === "string") {
    const Plain = Worker;
    window.Worker = class extends Plain {
        constructor() {
            super(URL.createObjectURL(new Blob([SEARCH_WORKER], { type: "text/javascript" })));
        }
    };
}
