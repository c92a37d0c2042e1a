"""Looks at data before they are used: values, statistics, what a checkpoint was trained on, dates that two sets share.

Gives checks, and the statistics that they hold data against. Imports weather.years and the rooms below it.
"""
