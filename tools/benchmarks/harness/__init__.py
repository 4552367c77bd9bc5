"""What the speed tools share: graphs to compare (`graphs`), turns and tables (`turns`), peers (`genai`, `peers`)."""
