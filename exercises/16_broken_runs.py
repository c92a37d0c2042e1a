"""Exercise 16, rungs 2 to 4: three broken runs.

    python -m exercises.16_broken_runs

trains small models for three steps on two ranks: `tensor` (tp2), `domain` (domain2) and `data` (dp2). Each run has one
fault. Printed is what `plan.py check` compares with one device, without the cause: of each stage the largest difference
on each rank, and then everything in the first stage that differs, in the order in which it is computed.

Say of each run:

  ranks: those on which the first difference is, such as [0, 1]
  where: the first module or parameter that differs, as in the table, or "all" where every one of the stage does
  cause: one of

    samples        a rank trains on other samples, or on another part of the image
    seed           a rank draws other initial weights
    missing sum    ranks have one term each of a sum, and a forward all-reduce is left out
    double sum     a forward all-reduce is made twice
    halo           a rank borrows too few rows from a neighbour
    norm           a norm takes the statistics of a rank's own part
    gradients      the all-reduce of gradients is left out
    learning rate  a rank's optimizer has another learning rate
    moments        a rank's optimizer loses its moments after a step

The convolutions of `domain` are `lift` and `head`, 1 x 1 points, and `wide`, 5 x 5. Done for real in
tools/layout_check/causes.py. Chapter: docs/losses_differ.md, "How the cause is guessed".
"""

# TODO: three answers to each run
ANSWERS = {
    "tensor": {"ranks": [], "where": "", "cause": ""},
    "domain": {"ranks": [], "where": "", "cause": ""},
    "data": {"ranks": [], "where": "", "cause": ""},
}
# END

if __name__ == "__main__":
    from exercises.checks.broken_runs import show
    from utils.errors import run_main

    run_main(show)
