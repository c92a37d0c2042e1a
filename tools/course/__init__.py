"""What an instructor needs for a class: folders, answers that are checked at once, and how long commands take.

Gives the commands of `python -m tools.course`. Imports no other room of tools.
"""
