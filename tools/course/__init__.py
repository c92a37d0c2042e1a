"""What an instructor needs for a class: folders, answers that are checked at once, and how long commands take."""
