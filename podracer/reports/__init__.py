"""Reports for people: HTML pages, figures, the terminal and videos."""
