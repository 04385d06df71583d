# All images of a stack with BuildKit: `docker buildx bake -f docker/docker-bake.hcl cuda`, from the project's root.
# Values come from the environment; `rlk-repro images build --bake` prints those of a stack.  No value has a default
# that could be the wrong pin.  `docker buildx bake --print` shows the plan without building.

group "default" {
  targets = ["cuda"]
}

variable "STACK" {}
variable "REVISION" {}
variable "SOURCE_DATE_EPOCH" {}
variable "VIME_REPOSITORY" {}
variable "VIME_COMMIT" {}
variable "RL_KERNEL_REPOSITORY" {}
variable "RL_KERNEL_COMMIT" {}
variable "CUDA_DOCKERFILE" {}
variable "CUDA_BASE_NAME" {}
variable "CUDA_BASE_DIGEST" {}
variable "ROCM_BASE_NAME" {}
variable "ROCM_BASE_DIGEST" {}
# The push target, without a tag: images are pushed by digest, and a manifest list joins the platforms afterwards.
variable "REPOSITORY" {
  default = "localhost/rlk-repro"
}

target "common" {
  context = "."
  args = {
    STACK                = STACK
    REVISION             = REVISION
    SOURCE_DATE_EPOCH    = SOURCE_DATE_EPOCH
    VIME_REPOSITORY      = VIME_REPOSITORY
    VIME_COMMIT          = VIME_COMMIT
    RL_KERNEL_REPOSITORY = RL_KERNEL_REPOSITORY
    RL_KERNEL_COMMIT     = RL_KERNEL_COMMIT
  }
  attest = [
    { type = "provenance", mode = "max" },
    # buildkit-syft-scanner 1.12.0
    {
      type      = "sbom"
      generator = "docker.io/docker/buildkit-syft-scanner@sha256:ae4f3b554449e7e25548e7d8ccc029d17357348e30c6e3df01b92bc93654d6a9"
    },
  ]
  output = ["type=image,name=${REPOSITORY},push-by-digest=true,name-canonical=true,push=true,rewrite-timestamp=true"]
}

target "cuda" {
  inherits   = ["common"]
  dockerfile = CUDA_DOCKERFILE
  platforms  = ["linux/amd64"]
  args = {
    BASE_NAME      = CUDA_BASE_NAME
    BASE_DIGEST    = CUDA_BASE_DIGEST
    IMAGE_PLATFORM = "cuda-amd64"
  }
}

# Build this on an arm64 machine: compiling CUDA under emulation takes days.
target "cuda-arm64" {
  inherits  = ["cuda"]
  platforms = ["linux/arm64"]
  args = {
    IMAGE_PLATFORM = "cuda-arm64"
  }
}

target "rocm" {
  inherits   = ["common"]
  dockerfile = "docker/Dockerfile.rocm"
  platforms  = ["linux/amd64"]
  args = {
    BASE_NAME      = ROCM_BASE_NAME
    BASE_DIGEST    = ROCM_BASE_DIGEST
    IMAGE_PLATFORM = "rocm-amd64"
  }
}
