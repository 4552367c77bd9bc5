"""What the tests of documents share."""

from quick import few_drafts, unpictured  # noqa: F401
