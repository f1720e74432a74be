"""What may be replaced, and what may not: the rule of docs/crashes.md, case by case and by random trees."""
