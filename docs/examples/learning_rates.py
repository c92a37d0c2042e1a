"""Peak learning rates of the configs for larger global batches.

python -m docs.examples.learning_rates
"""

from tools.tables import format_table
from training.optimizer import peak_learning_rate
from utils.config import load_config

BATCHES = (16, 32, 64, 128, 256, 512, 1024, 2048)


def main() -> None:
    """Print a table: config, peak learning rate."""
    rates = [peak_learning_rate(load_config([f"--config=bs{size}_opt"])) for size in BATCHES]
    names = [f"bs{size}_opt" for size in BATCHES]
    print(format_table({"config": "", **dict.fromkeys(names, ".6f")}, [["peak lr", *rates]]))


if __name__ == "__main__":
    main()
