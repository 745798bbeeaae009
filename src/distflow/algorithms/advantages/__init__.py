"""What advantage estimators share, and GAE."""
