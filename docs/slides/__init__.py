"""Slides for a course, made from the lessons: `make slides`."""
