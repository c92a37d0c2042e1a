"""Drawing of the lesson on ensembles."""

from docs.drawings.canvas import Drawing

MEMBERS = (1, 2, 4)
TRUTH = 3


def crps() -> Drawing:
    """The two terms of a CRPS: errors of three members, and the differences of their pairs."""
    d = Drawing(800, 270, "A CRPS by hand: the errors of three members, and how far apart the members are")
    left, scale = 110, 100  # points of the number 0, and of one unit

    def x(value: float) -> float:
        return left + value * scale

    d.words(x(2.5), 20, "three members and the truth", "middle", bold=True)
    d.line((x(0), 66), (x(5), 66))
    for value in range(6):
        d.line((x(value), 62), (x(value), 70))
        d.words(x(value), 84, f"{value}", "middle", 12)
    for number, value in enumerate(MEMBERS):
        d.box(x(value) - 34, 36, 68, 22, f"member {number}", "a", 12)
    d.box(x(TRUTH) - 26, 36, 52, 22, "truth", "talk", 12)

    # Each line is as long as the distance that it stands for.
    d.words(100, 122, "errors", "end")
    for number, value in enumerate(MEMBERS):
        y = 110 + 12 * number
        d.line((x(value), y), (x(TRUTH), y))
    d.words(x(4.2), 122, "2 + 1 + 1, in the mean 4/3")
    d.words(100, 178, "pairs", "end")
    for number, (first, second) in enumerate(((1, 2), (1, 4), (2, 4))):
        y = 166 + 12 * number
        d.line((x(first), y), (x(second), y))
    d.words(x(4.2), 178, "1 + 3 + 2, over M (M - 1): 1")
    d.words(x(2.5), 232, "CRPS = 4/3 - 1 = 1/3", "middle", bold=True)
    d.words(x(2.5), 256, "three members that all say 2: error 1, no differences, CRPS 1", "middle", 12)
    return d
