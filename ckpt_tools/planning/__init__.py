"""Plans: tasks from a manifest and a layout. Pure."""
