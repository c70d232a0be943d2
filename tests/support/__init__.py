"""What several test files share: cases, independent formulas and comparisons that can refuse."""
