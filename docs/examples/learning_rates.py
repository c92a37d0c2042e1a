"""Peak learning rates of the configs for larger global batches.

python -m docs.examples.learning_rates
"""

from tools.tables import format_table
from training.step.optimizer import peak_learning_rate
from utils.config import load_config

BATCHES = (16, 32, 64, 128, 256, 512, 1024, 2048)


def main() -> None:
    """Print a table: config, peak learning rate."""
    columns = {"config": ""}
    rates = []
    for size in BATCHES:
        name = f"bs{size}_opt"
        config = load_config([f"--config={name}"])
        rates.append(peak_learning_rate(config))
        columns[name] = ".6f"
    print(format_table(columns, [["peak lr", *rates]]))


if __name__ == "__main__":
    main()
