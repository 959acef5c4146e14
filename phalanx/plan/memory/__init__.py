"""Memory of a rank: `rank.rank_memory` of every pipeline rank, `bound.memory_bound` of many strategies at once."""
