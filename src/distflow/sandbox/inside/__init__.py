"""What runs in the fork server and behind the walls. Imports the standard library alone: nothing else is there."""
