"""What the paper publishes in words: relative gains of FedDPMS over FedAvg.

Chen and Vikalo, "Federated Learning in Non-IID Settings Aided by Differentially Private Synthetic
Data", arXiv 2206.00686, section 4. Its tables and curves are pictures or absent from the text, so
accuracies by method are not here.
"""

SOURCE = "Chen and Vikalo, arXiv 2206.00686, section 4"

GAINS: dict[str, dict[tuple[str, int], float]] = {
    "table1": {("fmnist", 10): 3.3, ("cifar10", 10): 4.5, ("cifar100", 10): 6.6},
    "table2": {
        ("cifar100", 10): 22.3,
        ("cifar100", 20): 15.6,
        ("cifar100", 30): 7.3,
        ("cifar100", 40): 7.7,
        ("cifar100", 50): 4.6,
    },
}
"""by table, then by data set and clients: how much more accurate FedDPMS is than FedAvg, relative,
in per cent, at beta 0.5"""
