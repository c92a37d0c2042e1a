"""What a number of the data means: its channel, units and range, its point of the grid, its date, how it is packed.

Gives channels, grids, dates and checks of values to all other rooms. Imports no other room of weather.
"""
