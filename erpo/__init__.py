"""ERPO: Environment-Regularized Policy Optimization (arXiv 2608.23311), as a pipeline that runs."""

__version__ = "0.1.0"
