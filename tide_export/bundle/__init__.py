"""The artefact on disk: its manifest, and reading and writing it safely."""
