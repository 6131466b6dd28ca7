"""Trains a small ResNet-18 on scikit-learn's digits, on the GPU where there is one and else on the CPU.

Needs: pip install 'flcuda[demo]'. Takes about a minute on two CPU cores.
"""

import sys

import flcuda
from flcuda import data, training

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 6

digits = data.digits()
model = flcuda.models.resnet18(num_classes=10, in_channels=1, stem="small", seed=0)
optimizer = flcuda.optim.SGD(model, lr=0.03, momentum=0.9, nesterov=True, weight_decay=5e-4)
steps = len(digits.train) // 64
schedule = training.WarmupCosine(0.03, steps * epochs, warmup=min(steps, steps * epochs // 4))
trainer = training.Trainer(model, optimizer, digits.train, digits.test, batch_size=64, schedule=schedule)
trainer.fit(epochs, on_epoch=print)
