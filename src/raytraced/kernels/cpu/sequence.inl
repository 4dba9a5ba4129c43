// One instruction set's copy of the sequence kernel: a file that includes this names it in RAYTRACED_ISA.
#include "sequence_backward.inl"
#include "sequence_final.inl"
#include "sequence_forward.inl"

namespace raytraced {
namespace RAYTRACED_ISA {

template <class S> struct Entry {
  static void lay_out(const SequenceArgs& args, void* memory, PackedGates& gates) {
    Pieces pieces(memory);
    gates = Gates<S>::lay_out(args, pieces);
    Gates<S>::start(args, gates);
  }
  static void forward(const SequenceArgs& args, PackedGates& gates, void* scratch, i64 begin, i64 end) {
    Pieces pieces(scratch);
    Forward<S> pass(args, gates, pieces);
    for (i64 b = begin; b < end; ++b) pass.run(b);
  }
  static i64 gradient_bytes(const SequenceArgs& args) { return GateGradient<S>(args, nullptr).bytes; }
  static i64 backward_bytes(const SequenceArgs& args, i64 max_active) {
    return args.estimator == NONE ? Final<S>::bytes(args) : Backward<S>::bytes(args, max_active);
  }
  static void backward(const SequenceArgs& args, PackedGates& gates, void* scratch, void* gradient, i64 max_active, i64 begin,
                       i64 end) {
    Pieces pieces(scratch);
    GateGradient<S>(args, gradient).start();
    if (args.estimator == NONE) {
      Final<S> pass(args, gates, pieces, gradient);
      for (i64 b = begin; b < end; ++b) pass.run(b);
    } else {
      Backward<S> pass(args, gates, pieces, gradient, max_active);
      pass.prepare();
      for (i64 b = begin; b < end; ++b) pass.run(b);
    }
  }
  static SequenceKernel kernel() {
    return {Gates<S>::bytes, lay_out,        Gates<S>::pack_all, Gates<S>::pack_used, Forward<S>::bytes, forward,
            backward_bytes,  gradient_bytes, backward,           reduce<S>};
  }
};

// Common numbers of experts are constants to the compiler, where the build can afford it.
template <bool FIXED> SequenceKernel sequence_kernel(const SequenceArgs& args) {
  if constexpr (FIXED) {
    if (args.is_double && args.experts == 8) return Entry<Shape<double, 4, 8>>::kernel();
    if (!args.is_double && args.experts == 4) return Entry<Shape<float, 4, 4>>::kernel();
    if (!args.is_double && args.experts == 8) return Entry<Shape<float, 8, 8>>::kernel();
    if (!args.is_double && args.experts == 16) return Entry<Shape<float, 8, 16>>::kernel();
    if (!args.is_double && args.experts == 32) return Entry<Shape<float, 8, 32>>::kernel();
  }
  if (args.is_double) return Entry<Shape<double, 4, 0>>::kernel();
  return args.experts <= 4 ? Entry<Shape<float, 4, 0>>::kernel() : Entry<Shape<float, 8, 0>>::kernel();
}

}  // namespace RAYTRACED_ISA
}  // namespace raytraced
