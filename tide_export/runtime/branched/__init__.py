"""One sequence on the branched graph, which decides for itself which segments run."""
