"""Names that stages share: operators, networks, and the inputs and outputs of each network."""
