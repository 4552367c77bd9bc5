"""Names of the networks of a bundle: of their files, their engines and their entries in the manifest."""

HEAD = "head"  # gives the logits; of the batch networks and of the segment networks
BEST, CANDIDATES = "best", "candidates"  # segment networks that reduce the logits to their maximum, to the c largest
AFTER_SEGMENTS = (HEAD, BEST, CANDIDATES)  # the segment networks that run after the segments
DRAFTER = "drafter"  # the drafter among the segment networks


def segment_name(k: int) -> str:
    """Returns the name of segment k's network."""
    return f"segment_{k:02}"
