"""Audits of hidden states that somebody has on disk, whoever wrote them."""
