"""One self-contained HTML page of one or several runs."""
