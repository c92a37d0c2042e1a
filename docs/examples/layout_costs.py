"""What a rank holds and sends for one sample, by formula: tensor beside context parallelism, few tokens and many.

python -m docs.examples.layout_costs
"""

from tools.benchmarks.model_parallel import build_cases
from tools.benchmarks.mp_theory import local_parameters, predicted_activations, predicted_messages
from tools.tables import format_table

CONFIGS = ("mp", "mp_patch4")  # 4,050 and 16,200 tokens
LAYOUTS = (
    "tp4", "tp4,sequence_parallel", "cp4", "cp4,cp_method=ring", "cp4,cp_method=all_to_all", "cp4,data_parallel=fsdp",
)  # fmt: skip
BYTES_A_PARAMETER = 16  # itself, its gradient, two moments of Adam, in float32
GIB = 2**30


def main() -> None:
    """Print a table in GiB."""
    rows = []
    for name in CONFIGS:
        words = [f"--config={name}", "--global_batch_size=1", "--amp_mode=none", "--no-enable_jit"]
        for case in build_cases(words, LAYOUTS):
            both = case.config, case.layout
            weights = BYTES_A_PARAMETER * local_parameters(*both) / (4 if "fsdp" in case.name else 1)
            forward, backward = [
                sum(size for _, size in kinds.values()) for kinds in list(predicted_messages(*both).values())[:2]
            ]
            figures = weights, predicted_activations(*both) or 0, forward, backward
            rows.append([f"{name}: {case.name}", *(figure / GIB for figure in figures)])
    columns = ("weights x 16", "activations", "sent forward", "sent backward, gradients included")
    print(format_table({"GiB of a rank": "", **dict.fromkeys(columns, ".2f")}, rows))


if __name__ == "__main__":
    main()
