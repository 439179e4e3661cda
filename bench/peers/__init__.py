"""Extreme classifiers of others on the same split and metrics: PECOS XR-Linear, omikuji, napkinXC."""
