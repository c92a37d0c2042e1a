"""A web server of a folder, on this machine's loopback: it counts what is asked for, and fails as it is told."""

import collections
import contextlib
import functools
import http.server
import re
import threading
from pathlib import Path

CHUNK = re.compile(r"/\d+(?:[./]\d+){2,}$")


# What a proxy gives in place of a file.
BAD_ANSWERS = {
    "page": lambda data: b"<html><body>Please sign in</body></html>",
    "empty": lambda data: b"",
    "short": lambda data: data[: len(data) // 2],
    "long": lambda data: data + bytes(100),
}


class WebServer(http.server.ThreadingHTTPServer):
    """asked: the paths of chunks, in order. status: {part of a path: answer so}.

    dead: requests are not answered, or with the status last_words.

    dies_after: the number of chunks after which it is dead, None for never. naps: then it lives again after so many
    requests that found it dead, None for never.

    bad: kinds of BAD_ANSWERS, which the first requests for each file get in turn, with status 200.
    """

    daemon_threads = True

    def __init__(self, folder):
        handler = functools.partial(Handler, directory=str(folder))
        super().__init__(("127.0.0.1", 0), handler)
        self.asked, self.status, self.lock = [], {}, threading.Lock()
        self.dead, self.dies_after, self.naps, self.refused = False, None, None, 0
        self.last_words = None
        self.bad, self.answered_badly = (), collections.Counter()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def is_dead(self, path):
        """Count a request; tell whether it finds the server dead."""
        with self.lock:
            if self.dies_after is not None and len(self.asked) >= self.dies_after and CHUNK.search(path):
                self.dead, self.dies_after = True, None
            if self.dead:
                self.refused += 1
                if self.naps is not None and self.refused > self.naps:
                    self.dead = False
            if not self.dead and CHUNK.search(path):
                self.asked.append(path)
            return self.dead

    def handle_error(self, request, client_address):
        """A client that has had enough is no error."""


class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        if self.server.is_dead(self.path):
            self.close_connection = True
            if self.server.last_words:
                self.send_error(self.server.last_words)
            return
        for part, status in self.server.status.items():
            if part in self.path:
                self.send_error(status)
                return
        path = Path(self.translate_path(self.path))
        given = self.server.answered_badly[path]
        if path.is_file() and given < len(self.server.bad):
            self.server.answered_badly[path] += 1
            self.answer_badly(BAD_ANSWERS[self.server.bad[given]](path.read_bytes()))
            return
        super().do_GET()

    def answer_badly(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(folder):
    """A WebServer of a folder, as long as the block runs."""
    with WebServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
