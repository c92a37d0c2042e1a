"""Without pictures a validation of a tiny run takes hundredths of a second, with them a second.

Trainings in the tests draw none, but for those that ask for the fixture `pictures` and those in processes of their own.
"""

from training.tasks import validation

PICTURED = validation.PICTURED


def draw_none():
    validation.PICTURED = ()
