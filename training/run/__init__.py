"""A run: its loop, its folder and who owns it, its checkpoints, what it reports while it trains, and its end.

It gives scripts the class Run. It may import every other room of training/.
"""
