"""The idealised atmosphere of the sample data.

Gives frames to the command sample_data. Imports weather.fields.
"""
