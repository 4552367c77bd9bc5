"""What the tests of drafters share."""

from quick import few_drafts  # noqa: F401
