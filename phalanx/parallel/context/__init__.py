"""Context parallel: every sequence is split over ranks; attention meets the keys of the others."""
