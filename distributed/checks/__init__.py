"""What a model or a choice of options cannot do in parallel, found before it trains or while it does.

Gives the rest of distributed its refusals and watches, so that the lessons are read without them. Imports utils alone.
"""
