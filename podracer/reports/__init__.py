"""What a person looks at: pages, figures, the terminal and videos."""
