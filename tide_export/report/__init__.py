"""The suitability page: what a model gains by exits, as HTML and pictures."""
