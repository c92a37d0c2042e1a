"""Memory and messages of a rank for one sample, by formula: tensor beside context parallelism, few tokens and many.

python -m docs.examples.layout_costs
"""

from tools.benchmarks.layouts import layout_cases
from tools.planner.textbook import textbook_traces
from tools.tables import format_table

CONFIGS = ("mp", "mp_patch4")  # 4,050 and 16,200 tokens
LAYOUTS = (
    "tp4",
    "tp4,sequence_parallel",
    "cp4",
    "cp4,cp_method=ring",
    "cp4,cp_method=all_to_all",
    "cp4,data_parallel=fsdp",
)
STATES = ("parameters", "gradients", "optimizer")
GIB = 2**30


def main() -> None:
    """Print a table in GiB."""
    rows = []
    for name in CONFIGS:
        words = [f"--config={name}", "--global_batch_size=1", "--amp_mode=none", "--no-enable_jit"]
        for case in layout_cases(words, LAYOUTS):
            (trace,) = textbook_traces(case.config, case.layout)
            sent = {"forward": 0.0, "backward": 0.0}
            for message, calls in trace.messages.items():
                sent[message.phase] += calls * message.sent
            states = sum(trace.held[state] for state in STATES)
            figures = (states, trace.held["activations"], *sent.values())
            rows.append([f"{name}: {case.name}", *(figure / GIB for figure in figures)])
    columns = ("weights x 16", "activations", "sent forward", "sent backward, gradients included")
    print(format_table({"GiB of a rank": "", **dict.fromkeys(columns, ".2f")}, rows))


if __name__ == "__main__":
    main()
